"""Builds the packages of the editors into `dist/`: `keystroke.vsix` and `keystroke.nvim.tar.gz`.

The VS Code extension is compiled in `build/`, with the versions of its lock file from the npm registry. A
.vsix file is a zip archive with a manifest, which is written here, so that no further tool is fetched.

    python editors/build.py          or: make editors
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
SOURCE = ROOT / "editors" / "vscode"
STAMP = (2020, 1, 1, 0, 0, 0)  # the same files give the same archive
TYPES = """<?xml version="1.0" encoding="utf-8"?>
<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">
{rows}
</Types>
"""
MANIFEST = """<?xml version="1.0" encoding="utf-8"?>
<PackageManifest Version="2.0.0" xmlns="http://schemas.microsoft.com/developer/vsx-schema/2011">
  <Metadata>
    <Identity Language="en-US" Id="{name}" Version="{version}" Publisher="{publisher}" />
    <DisplayName>{title}</DisplayName>
    <Description xml:space="preserve">{about}</Description>
    <Tags>{tags}</Tags>
    <Categories>{categories}</Categories>
    <GalleryFlags>Public</GalleryFlags>
    <Properties>
      <Property Id="Microsoft.VisualStudio.Code.Engine" Value="{engine}" />
      <Property Id="Microsoft.VisualStudio.Code.ExtensionKind" Value="workspace" />
      <Property Id="Microsoft.VisualStudio.Services.Links.Source" Value="{repository}" />
    </Properties>
    <License>extension/LICENSE.txt</License>
  </Metadata>
  <Installation><InstallationTarget Id="Microsoft.VisualStudio.Code" /></Installation>
  <Dependencies />
  <Assets>
    <Asset Type="Microsoft.VisualStudio.Code.Manifest" Path="extension/package.json" Addressable="true" />
    <Asset Type="{services}.Details" Path="extension/README.md" Addressable="true" />
    <Asset Type="{services}.License" Path="extension/LICENSE.txt" Addressable="true" />
  </Assets>
</PackageManifest>
"""

sys.path.insert(0, str(ROOT / "web"))

from node import node_folder  # type: ignore[import-not-found]  # noqa: E402


def compile_extension(room: Path) -> None:
    """Install the locked packages and compile, in a folder of its own; only what runs stays."""
    shutil.rmtree(room, ignore_errors=True)
    room.mkdir(parents=True)
    for name in ("package.json", "package-lock.json", "tsconfig.json", "README.md"):
        shutil.copy(SOURCE / name, room / name)
    shutil.copytree(SOURCE / "src", room / "src")
    shutil.copy(ROOT / "LICENSE", room / "LICENSE.txt")
    folder = node_folder(room.parent / "node")
    clean = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}
    quiet = ("--ignore-scripts", "--no-audit", "--no-fund")
    for command in (["ci", *quiet], ["run", "build"], ["prune", "--omit=dev", *quiet]):
        subprocess.run([str(folder / "npm"), *command], cwd=room, env=clean, check=True)


def write_vsix(room: Path, target: Path) -> None:
    """Write the extension in `room` as a .vsix file."""
    package = json.loads((room / "package.json").read_text(encoding="utf-8"))
    kept = ("out", "node_modules", "package.json", "README.md", "LICENSE.txt")
    files = sorted(
        path
        for name in kept
        for path in ((room / name).rglob("*") if (room / name).is_dir() else [room / name])
        if path.is_file()
        and path.suffix not in (".map", ".ts", ".mts", ".cts")
        and ".bin" not in path.parts
        and path.name != ".package-lock.json"
    )
    endings = sorted({path.suffix for path in files if path.suffix} | {".vsixmanifest"})
    rows = "\n".join(
        f'  <Default Extension="{ending}" ContentType="application/octet-stream" />' for ending in endings
    )
    manifest = MANIFEST.format(
        services="Microsoft.VisualStudio.Services.Content",
        name=package["name"],
        version=package["version"],
        publisher=package["publisher"],
        title=escape(package["displayName"]),
        about=escape(package["description"]),
        tags=escape(",".join(package.get("keywords", ()))),
        categories=escape(",".join(package["categories"])),
        engine=package["engines"]["vscode"],
        repository=escape(package["repository"]["url"]),
    )
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(name: str, data: bytes) -> None:
            entry = zipfile.ZipInfo(name, STAMP)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data)

        add("extension.vsixmanifest", manifest.encode())
        add("[Content_Types].xml", TYPES.format(rows=rows).encode())
        for path in files:
            add(f"extension/{path.relative_to(room).as_posix()}", path.read_bytes())


def write_neovim(target: Path) -> None:
    """Write the Neovim plugin as an archive that a plugin manager can unpack."""
    source = ROOT / "editors" / "neovim"

    def plain(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        entry.uid = entry.gid = 0
        entry.uname = entry.gname = ""
        entry.mtime = 1577836800
        return entry

    with tarfile.open(target, "w:gz") as archive:
        for path in sorted(source.rglob("*")):
            if path.is_file():
                name = f"keystroke.nvim/{path.relative_to(source).as_posix()}"
                archive.add(path, name, filter=plain)
        archive.add(ROOT / "LICENSE", "keystroke.nvim/LICENSE", filter=plain)


def main() -> None:
    DIST.mkdir(exist_ok=True)
    write_neovim(DIST / "keystroke.nvim.tar.gz")
    room = ROOT / "build" / "vscode"
    compile_extension(room)
    write_vsix(room, DIST / "keystroke.vsix")
    for name in ("keystroke.vsix", "keystroke.nvim.tar.gz"):
        sys.stdout.write(f"dist/{name}: {(DIST / name).stat().st_size / 1000:,.0f} KB\n")


if __name__ == "__main__":
    main()
