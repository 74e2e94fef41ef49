// Draws the charts from the JSON beside them, in the colours of the theme.
"use strict";
(() => {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const touch = matchMedia("(any-pointer: coarse)").matches;
  const narrow = () => innerWidth < 600;

  // Figures have the colours of the light theme.
  const dark = JSON.parse(document.getElementById("dark").textContent);
  const themed = (value, key = "") => {
    if (Array.isArray(value)) return value.map((item) => themed(item, key));
    if (typeof value === "string") return /color(scale)?$/.test(key) ? (dark[value] ?? value) : value;
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, themed(v, k)]));
  };

  const template = () => {
    const text = css("--text");
    const axis = {
      gridcolor: css("--grid"),
      zerolinecolor: css("--grid"),
      linecolor: css("--line"),
      tickcolor: css("--line"),
      showline: true,
      ticks: "outside",
      ticklen: 4,
      automargin: true,
      fixedrange: touch, // a finger that drags wants to scroll the page
      spikecolor: css("--muted"),
      spikethickness: 1,
      spikedash: "solid",
      title: { standoff: 10, font: { size: 12 } },
    };
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { color: css("--muted"), family: css("--sans"), size: 12 },
        hoverlabel: {
          bgcolor: css("--raised"),
          bordercolor: css("--line"),
          font: { color: text, family: css("--sans"), size: 12.5 },
          namelength: -1,
          align: "left",
        },
        modebar: { bgcolor: css("--surface"), color: css("--muted"), activecolor: text },
        legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", font: { color: text } },
        xaxis: axis,
        yaxis: axis,
      },
    };
  };

  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: touch ? false : "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    scrollZoom: false,
    doubleClick: "reset",
  };

  const emphasise = (data, chosen) =>
    chosen === null
      ? data
      : data.map((trace, i) =>
          i === chosen
            ? { ...trace, line: { ...trace.line, width: 3.5 } }
            : { ...trace, opacity: 0.18 },
        );

  const draw = (plot) => {
    const figure = document.documentElement.dataset.theme === "dark" ? themed(plot.figure) : plot.figure;
    const layout = {
      ...figure.layout,
      template: template(),
      dragmode: false,
      margin: { l: 8, r: 12, t: 8, b: 8 },
      uirevision: "kept", // what the reader hid or zoomed stays so in the other theme
      height: figure.layout.height + (narrow() && figure.layout.showlegend ? 16 * Math.max(5, figure.data.length) : 0),
    };
    return Plotly.react(plot, emphasise(figure.data, plot.chosen), layout, config).then(() => {
      // The table below has the data in words; the buttons stay reachable.
      plot.querySelectorAll("svg.main-svg").forEach((svg) => svg.setAttribute("aria-hidden", "true"));
    });
  };

  const plots = [...document.querySelectorAll(".chart-plot")];
  for (const plot of plots) {
    plot.figure = JSON.parse(document.getElementById(`${plot.id}-data`).textContent);
    plot.chosen = null;
    const select = document.getElementById(`${plot.id}-highlight`);
    select?.closest("label").removeAttribute("hidden");
    select?.addEventListener("change", () => {
      plot.chosen = select.value === "" ? null : Number(select.value);
      draw(plot);
    });
  }
  // It is packed, and runs since the page's policy has its hash.
  const loadPlotly = async () => {
    const packed = atob(document.getElementById("plotly").textContent);
    const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
    const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  };
  const drawAll = async () => {
    const { theme } = document.documentElement.dataset;
    await Promise.all(plots.map(draw));
    document.documentElement.dataset.drawn = theme;
  };
  const start = async () => {
    try {
      await loadPlotly();
    } catch {
      document.getElementById("no-charts").hidden = false;
      return;
    }
    document.addEventListener("themechange", drawAll);
    const { theme } = document.documentElement.dataset;
    for (const plot of plots) {
      await draw(plot);
      await new Promise((resume) => setTimeout(resume)); // the reader scrolls already
    }
    performance.mark("drawn");
    if (theme === document.documentElement.dataset.theme) document.documentElement.dataset.drawn = theme;
    else await drawAll();
  };
  start();

  // Paper has another width, and the browser lays it out without a resize event.
  const resize = () => plots.forEach((plot) => Plotly.Plots.resize(plot));
  matchMedia("print").addEventListener("change", resize);

  // The table of contents marks the section that is read.
  const links = new Map(
    [...document.querySelectorAll("nav a")].map((a) => [a.hash.slice(1), a]),
  );
  const visible = new Set();
  const observer = new IntersectionObserver(
    (entries) => {
      for (const { target, isIntersecting } of entries) {
        visible[isIntersecting ? "add" : "delete"](target.id);
      }
      const first = [...links.keys()].find((id) => visible.has(id));
      if (first === undefined) return;
      for (const [id, link] of links) {
        if (id === first) link.setAttribute("aria-current", "true");
        else link.removeAttribute("aria-current");
      }
    },
    { rootMargin: "-10% 0px -60% 0px" },
  );
  document.querySelectorAll("main > section").forEach((section) => observer.observe(section));
})();
