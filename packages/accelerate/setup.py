"""Source distributions whose bytes depend on the sources alone: setuptools writes the moment of the build into them."""

import gzip
import os
import tarfile
from pathlib import Path

from setuptools import setup
from setuptools.command.sdist import sdist


class ReproducibleSdist(sdist):
    """An archive with one moment, owner and order (https://reproducible-builds.org/docs/archives/)."""

    def make_archive(self, base_name, format, root_dir=None, base_dir=None, owner=None, group=None):
        """Write the archive of a folder; where `SOURCE_DATE_EPOCH` is not set, or for other formats, as setuptools does."""
        if "SOURCE_DATE_EPOCH" not in os.environ or format != "gztar":
            return super().make_archive(base_name, format, root_dir, base_dir, owner, group)
        moment = int(os.environ["SOURCE_DATE_EPOCH"])

        def normalised(entry):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = moment, 0, 0, "", ""
            entry.mode = 0o755 if entry.isdir() or entry.mode & 0o100 else 0o644
            return entry

        root = Path(root_dir or ".")
        path = f"{base_name}.tar.gz"
        with (
            open(path, "wb") as raw,
            gzip.GzipFile("", "wb", fileobj=raw, mtime=moment) as zipped,
            tarfile.open(fileobj=zipped, mode="w") as archive,
        ):
            for file in sorted((root / base_dir).rglob("*")):
                archive.add(file, file.relative_to(root).as_posix(), recursive=False, filter=normalised)
        return path


setup(cmdclass={"sdist": ReproducibleSdist})
