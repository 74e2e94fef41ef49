// Draw the charts from the JSON next to them.
"use strict";
(() => {
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const touch = matchMedia("(any-pointer: coarse)").matches;
  const narrow = () => innerWidth < 600;

  // Colours of the light theme. The style sheet inverts the charts for the dark theme.
  const [text, muted, line, grid] = ["#1a1d23", "#575d69", "#d5d9e0", "#e8eaee"];
  const axis = {
    gridcolor: grid,
    zerolinecolor: grid,
    linecolor: line,
    tickcolor: line,
    showline: true,
    ticks: "outside",
    ticklen: 4,
    automargin: true,
    fixedrange: touch, // dragging a finger must scroll the page
    spikecolor: muted,
    spikethickness: 1,
    spikedash: "solid",
    title: { standoff: 10, font: { size: 12 } },
  };
  const family = css("--sans");
  const template = {
    layout: {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      // The left margin fits most axis labels. Otherwise the width of the labels and the number of
      // lines of the legend would change each other, and Plotly would stop with a warning.
      margin: { l: 68, r: 12, t: 8, b: 8 },
      dragmode: false,
      font: { color: muted, family, size: 12 },
      hoverlabel: {
        bgcolor: "#ffffff",
        bordercolor: line,
        font: { color: text, family, size: 12.5 },
        namelength: -1,
        align: "left",
      },
      modebar: { bgcolor: "#ffffff", color: muted, activecolor: text },
      legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom", traceorder: "normal", maxheight: 120, font: { color: text } },
      xaxis: axis,
      yaxis: axis,
    },
  };

  const config = {
    responsive: true,
    displaylogo: false,
    displayModeBar: touch ? false : "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    scrollZoom: false,
    doubleClick: "reset",
  };

  const plots = [...document.querySelectorAll(".chart-plot")];
  const draw = async (plot) => {
    const figure = JSON.parse(document.getElementById(`${plot.id}-data`).textContent);
    const layout = { ...figure.layout, template };
    if (narrow() && layout.showlegend) layout.height += Math.min(120, 16 * figure.data.length);
    await Plotly.newPlot(plot, figure.data, layout, config);
    // Hide the drawing from screen readers, which read the table below. Buttons stay reachable.
    plot.querySelectorAll("svg.main-svg").forEach((svg) => svg.setAttribute("aria-hidden", "true"));
  };
  const loadPlotly = async () => {
    const packed = atob(document.getElementById("plotly").textContent);
    const bytes = Uint8Array.from(packed, (character) => character.charCodeAt(0));
    const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  };
  const start = async () => {
    try {
      await loadPlotly();
    } catch {
      document.getElementById("no-charts").hidden = false;
      return;
    }
    for (const plot of plots) {
      await draw(plot);
      await new Promise((resume) => setTimeout(resume)); // let the browser scroll between charts
    }
    performance.mark("drawn");
    document.documentElement.dataset.drawn = "all";
  };
  start();

  // Resize for printing: paper has another width, and browsers send no resize event.
  const resize = () => plots.forEach((plot) => Plotly.Plots.resize(plot));
  matchMedia("print").addEventListener("change", resize);

  // Mark the section in view in the table of contents.
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
