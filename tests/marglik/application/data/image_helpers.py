"""Images and archives in the bytes of their files."""

import io
import tarfile

from PIL import Image


def encoded(pixels, suffix="jpg", **options):
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, {"jpg": "JPEG", "png": "PNG"}[suffix], **options)
    return stream.getvalue()


def write_archive(path, files):
    """A tar archive, compressed as its name says."""
    mode = "w:gz" if path.suffix in {".gz", ".tgz"} else "w"
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path
