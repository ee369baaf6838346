"""Read surfaces of polygons from VTK's XML files (.vtp, PolyData): corners of the polygons and values on them.

Arrays may be ascii, binary (base64), or appended (raw or base64), compressed with zlib or not. Nothing of a file is
executed, and a document type declaration, which could define entities without end, is refused before the XML is parsed.
The file is mapped into memory, so that of appended arrays only those asked for are read.
"""

from __future__ import annotations

import base64
import mmap
import re
import zlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np

TYPES = {"Float32": "f4", "Float64": "f8", "Int8": "i1", "UInt8": "u1", "Int16": "i2", "UInt16": "u2", "Int32": "i4",
         "UInt32": "u4", "Int64": "i8", "UInt64": "u8"}
ORDERS = {"LittleEndian": "<", "BigEndian": ">"}
COMPRESSORS = (None, "vtkZLibDataCompressor")


class Surface:
    """A .vtp file of one piece. ValueError naming it, also when arrays are read, for what is damaged or of another kind."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._open()
        except Exception as error:  # damaged XML, attributes and numbers raise what their parsers raise
            raise ValueError(f"{path}: expected polygons in VTK's XML format ({error})") from None

    def _open(self) -> None:
        with open(self.path, "rb") as stream:
            self._data = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        marker = re.search(rb"<AppendedData[^>]*>\s*_", self._data)
        head = self._data[:marker.start()] + b"</VTKFile>" if marker else self._data[:]
        text = head.decode("utf-8")  # as text: no encoding that it declares can hide anything
        if "<!DOCTYPE" in text:
            raise ValueError("it has a document type declaration")
        root = ElementTree.fromstring(text)
        self._start, self._encoded = (marker.end(), b"base64" in marker[0]) if marker else (0, False)
        self._order = ORDERS[root.get("byte_order", "")]
        self._header = np.dtype(self._order + TYPES[root.get("header_type", "UInt32")])
        self._compressed = root.get("compressor") is not None
        if root.get("compressor") not in COMPRESSORS:
            raise ValueError(f"compressor {root.get('compressor')}, expected none or zlib")
        self._piece, = root.findall("PolyData/Piece")
        self.num_points, self.num_cells = (int(self._piece.get(f"NumberOf{kind}", "")) for kind in ("Points", "Polys"))
        if any(int(self._piece.get(f"NumberOf{kind}", 0)) for kind in ("Verts", "Lines", "Strips")):
            raise ValueError("it has other cells too")

    def centres(self, cells: np.ndarray) -> np.ndarray:
        """Mean of the corners of `cells` [S], [S, 3]: for triangles and quadrilaterals what vtkCellCenters gives."""
        points = self._read("Points/DataArray", self.num_points, 3)
        offsets = self._read("Polys/DataArray[@Name='offsets']", self.num_cells, 1)[:, 0].astype(np.int64)
        corners = self._read("Polys/DataArray[@Name='connectivity']", int(offsets[-1]), 1)[:, 0]
        counts = np.diff(offsets, prepend=0)
        if counts.min() < 1 or corners.min() < 0 or corners.max() >= self.num_points:
            raise ValueError(f"{self.path}: a polygon without corners, or a corner that is no point")
        counts = counts[cells]
        starts = np.cumsum(counts) - counts  # in the corners of the chosen cells, one cell behind the other
        chosen = np.arange(counts.sum()) + np.repeat(offsets[cells] - counts - starts, counts)
        return np.add.reduceat(points[corners[chosen]].astype(np.float64), starts) / counts[:, None]

    def values(self, name: str, num_components: int) -> np.ndarray:
        """A named array of the polygons, [num_cells, num_components]."""
        return self._read(f"CellData/DataArray[@Name='{name}']", self.num_cells, num_components)

    def _read(self, place: str, rows: int, columns: int) -> np.ndarray:
        element = self._piece.find(place)
        if element is None:
            raise ValueError(f"{self.path}: {place} is missing")
        try:
            dtype = np.dtype(self._order + TYPES[element.get("type", "")])
            if element.get("format") == "ascii":
                values = np.array((element.text or "").split(), dtype)
            else:
                values = np.frombuffer(self._bytes(element, rows * columns * dtype.itemsize), dtype)
            return values.reshape(rows, columns)
        except Exception as error:
            raise ValueError(f"{self.path}: {place} is damaged or cut short ({error})") from None

    def _bytes(self, element: ElementTree.Element, expected: int) -> bytes:
        """Content of an array of `expected` bytes, which follows a header that counts bytes (compressed: blocks)."""
        data: bytes | mmap.mmap
        if element.get("format") == "appended":
            data, start, encoded = self._data, self._start + int(element.get("offset", "")), self._encoded
        else:
            data, start, encoded = "".join((element.text or "").split()).encode("ascii"), 0, True
        width = self._header.itemsize
        if not self._compressed:
            header, end = _segment(data, start, width, encoded)
            if (claimed := int(np.frombuffer(header, self._header)[0])) != expected:
                raise ValueError(f"{claimed} bytes, expected {expected}")
            if encoded and data[end - 1:end] != b"=":  # header and bytes are encoded in one
                return _segment(data, start, width + expected, encoded)[0][width:]
            return _segment(data, end, expected, encoded)[0]
        number, size, last = np.frombuffer(_segment(data, start, 3 * width, encoded)[0], self._header).tolist()
        full = number - 1 if last else number
        if full * size + last != expected:
            raise ValueError(f"{full} blocks of {size} bytes and {last}, expected {expected} bytes")
        header, at = _segment(data, start, (3 + number) * width, encoded)
        lengths = np.frombuffer(header, self._header)[3:].tolist()
        packed = _segment(data, at, sum(lengths), encoded)[0]
        blocks, at = [], 0
        for length, unpacked in zip(lengths, [size] * full + [last]):
            blocks.append(zlib.decompressobj().decompress(packed[at:at + length], max(1, unpacked)))  # no more
            at += length
        return b"".join(blocks)


def _segment(data: bytes | mmap.mmap, start: int, size: int, encoded: bool) -> tuple[bytes, int]:
    """`size` bytes from `start`, in base64 or as they are, and where they end."""
    end = start + (-(-size // 3) * 4 if encoded else size)
    segment = base64.b64decode(data[start:end], validate=True)[:size] if encoded else data[start:end]
    if start < 0 or len(segment) < size:
        raise ValueError("the file ends before")
    return segment, end
