"""Reads the head of a GGUF file, to say what is wrong with it before llama.cpp meets it.

llama.cpp's own parser answers a broken file with a log line at best and with the end of the
process at worst. This reader never trusts a length: every one is compared with the bytes that
are really there, counts are bounded, and arrays are stepped over, not kept. It knows nothing
about models beyond names and sizes. Layout: ggml/include/gguf.h.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, Final

from attrs import astuple, frozen

from uma_trio.backend.base import ModelError, ModelFacts
from uma_trio.words import one_line

Value = str | int | float | bool | tuple[int, ...]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)  # 1 is no longer read by llama.cpp, 4 does not exist
_MAX_HEADER: Final = 512 << 20  # a vocabulary of 262k with its merges takes about 16 MiB
_MAX_KEYS: Final = 1 << 16
_MAX_TENSORS: Final = 1 << 20
_MAX_STRINGS: Final = 1 << 22  # in one array; the largest vocabularies have 2**18
_MAX_KEPT: Final = 1 << 20  # longer strings are stepped over; chat templates reach 20 KiB
_MAX_KEPT_NUMBERS: Final = 4096  # per-layer arrays are kept, token scores are not
_MAX_DIMS: Final = 4  # GGML_MAX_DIMS
_CHUNK: Final = 1 << 20

# GGUF value types: struct code by number; 7 is bool, 8 string, 9 array.
_SCALARS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"} | {
    10: "Q",
    11: "q",
    12: "d",
}
_STRING: Final = 8
_TOKENS: Final = "tokenizer.ggml.tokens"
_ARRAY: Final = 9

# ggml types: elements and bytes of a block (ggml/src/ggml-common.h); removed ones are missing.
_BLOCKS: Final = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    9: (32, 36), 10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176),
    14: (256, 210), 15: (256, 292), 16: (256, 66), 17: (256, 74), 18: (256, 98),
    19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82), 23: (256, 136), 24: (1, 1),
    25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17), 40: (64, 36), 41: (128, 18), 42: (64, 18),
}  # fmt: skip
_REMOVED: Final = frozenset({4, 5, 31, 32, 33, 36, 37, 38})

_OTHER_FORMATS: Final = (
    (b"version https://git-lfs", "a Git LFS pointer; fetch the file itself with `git lfs pull`"),
    (b"<", "a web page; the download went to the wrong address"),
    (b"PK\x03\x04", "a PyTorch or zip archive; convert it with llama.cpp's convert_hf_to_gguf.py"),
    (b"lmgg", "an old GGML file; get the model as GGUF"),
    (b"tjgg", "an old GGJT file; get the model as GGUF"),
    (b"fmgg", "an old GGMF file; get the model as GGUF"),
)
_VERBATIM: Final = ("tokenizer.",)  # keys whose strings are for the model, not for people
_MOST_NAME: Final = 256  # characters, as of a name that is configured
_MOST_KNOWN: Final = 64  # headers
_MOST_KNOWN_CHARS: Final = 64 << 20  # of the strings of all of them
# A file that was written again within one tick of the kernel's clock has the same times.
_SETTLED_NS: Final = 50_000_000
_SPLIT_NAME: Final = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")


@frozen
class Tensor:
    """An entry of the list of tensors, `kind` being ggml's number of its type.

    Of a type that is newer than this reader `n_bytes` is 0.
    """

    name: str
    n_bytes: int
    kind: int = 0

    @property
    def n_elements(self) -> int:
        """The number of its weights; 0 of a type that is newer than this reader."""
        per_block, block_bytes = _BLOCKS.get(self.kind, (0, 1))
        return self.n_bytes // block_bytes * per_block


@frozen
class GgufHeader:
    """What the head of a model file says; `tensors` and `size_bytes` are of all its parts."""

    path: Path
    parts: tuple[Path, ...]  # `path`, and the others of a split model
    version: int
    metadata: Mapping[str, Value]
    tensors: tuple[Tensor, ...]
    size_bytes: int

    @property
    def name(self) -> str:
        """What the file calls the model, or else the name of the file."""
        return name_of(self.metadata.get("general.name"), self.path)

    @property
    def architecture(self) -> str:
        """The model family as llama.cpp names it, "" if the file does not say."""
        value = self.metadata.get("general.architecture", "")
        return value if isinstance(value, str) else ""

    def number(self, key: str, default: int = 0) -> int:
        """Return ``<architecture>.<key>`` as an integer; of a per-layer array the largest."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        each = value if isinstance(value, tuple) else (value,)
        return max([_whole(one, default) for one in each], default=default)

    def numbers(self, key: str, count: int, default: int = 0) -> tuple[int, ...]:
        """Return ``<architecture>.<key>`` for each of `count` layers."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, tuple):
            return tuple(_whole(one, default) for one in (*value, *([default] * count))[:count])
        return (_whole(value, default),) * count


#: No model has so much of anything; NaN is not below it either.
_NO_FIGURE: Final = 1 << 40


def _whole(value: object, default: int) -> int:
    if isinstance(value, int | float) and abs(value) < _NO_FIGURE:
        return int(value)
    return default


Mark = tuple[int, int, int, int]
"""What tells a file from the one that had its name before."""

_known: OrderedDict[Path, tuple[tuple[Mark, ...], GgufHeader, int]] = OrderedDict()
_known_lock = threading.Lock()


def mark_of(path: Path) -> Mark:
    """Return device, number, size and time of a file. Raises :class:`ModelError` if there is none."""
    try:
        return _mark(path.stat())
    except OSError as error:
        raise ModelError(_cannot_open(path, error)) from error


def _mark(found: os.stat_result) -> Mark:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def name_of(found: object, path: Path) -> str:
    """Return what a model is called by its file: `found`, the ``general.name`` in it, or else the name of the file."""
    return one_line(str(found or ""))[:_MOST_NAME].strip() or one_line(path.stem)


def read_header(path: Path) -> GgufHeader:
    """Return the head of the model at `path`, and of all its parts if it is split, read and checked unless it is known.

    Raises :class:`ModelError`, one sentence for the operator, if the file is missing, not a
    regular file, not readable, empty, of another format, damaged, or shorter than its tensors.
    """
    found = known_header(path)
    if found is None:
        began_ns = time.time_ns()
        found = _read_all(path)
        adopt_header(found, began_ns)
    return found


def known_header(path: Path) -> GgufHeader | None:
    """Return the head of a file that was read before and is still the same; None if it has to be read."""
    with _known_lock:
        found = _known.get(path)
    if found is None:
        return None
    marks, header, _ = found
    try:
        return header if tuple(map(mark_of, header.parts)) == marks else None
    except ModelError:
        return None


def adopt_header(header: GgufHeader, began_ns: int) -> None:
    """Keep a header, whose reading began at `began_ns` since the epoch, for :func:`read_header` while its files stay the same."""
    strings = [text for text in header.metadata.values() if isinstance(text, str)]
    chars = sum(map(len, strings)) + sum(len(tensor.name) for tensor in header.tensors)
    try:
        stats = [part.stat() for part in header.parts]
    except OSError:
        return
    changed_ns = max(max(one.st_mtime_ns, one.st_ctime_ns) for one in stats)
    if changed_ns > began_ns - _SETTLED_NS:
        return
    with _known_lock:
        _known[header.path] = tuple(map(_mark, stats)), header, chars
        _known.move_to_end(header.path)
        while len(_known) > _MOST_KNOWN or sum(n for *_, n in _known.values()) > _MOST_KNOWN_CHARS:
            _known.popitem(last=False)


def to_plain(header: GgufHeader) -> dict[str, Any]:
    return {
        "parts": [str(part) for part in header.parts],
        "version": header.version,
        "metadata": dict(header.metadata),
        "tensors": [list(astuple(each)) for each in header.tensors],
        "size_bytes": header.size_bytes,
    }


def from_plain(found: Mapping[str, Any], path: Path) -> GgufHeader:
    """Return the header of `path` that :func:`to_plain` wrote."""
    values = found["metadata"].items()
    return GgufHeader(
        path,
        tuple(map(Path, found["parts"])),
        found["version"],
        {key: tuple(value) if isinstance(value, list) else value for key, value in values},
        tuple(Tensor(*each) for each in found["tensors"]),
        found["size_bytes"],
    )


def _read_all(path: Path) -> GgufHeader:
    header = _read_one(path)
    count = header.metadata.get("split.count", 0)
    if not isinstance(count, int) or count <= 1:
        return header
    name = _SPLIT_NAME.match(path.name)
    if name is None or int(name["count"]) != count:
        raise ModelError(
            f"{path} is one of {count} parts, so its name must end like -00001-of-{count:05}.gguf;"
            f" rename the parts as they were published."
        )
    if int(name["no"]) != 1:
        raise ModelError(
            f"{path} is part {int(name['no'])} of {count}; name the first part"
            f" ({name['stem']}-00001-of-{count:05}.gguf) instead."
        )
    parts = [
        _read_one(path.with_name(f"{name['stem']}-{no:05}-of-{count:05}.gguf"))
        for no in range(2, count + 1)
    ]
    return GgufHeader(
        path,
        (path, *(part.path for part in parts)),
        header.version,
        header.metadata,
        (*header.tensors, *(tensor for part in parts for tensor in part.tensors)),
        header.size_bytes + sum(part.size_bytes for part in parts),
    )


def _read_one(path: Path) -> GgufHeader:
    try:
        info = path.stat()
    except OSError as error:
        raise ModelError(_cannot_open(path, error)) from error
    if stat.S_ISDIR(info.st_mode):
        raise ModelError(f"{path} is a directory; name the .gguf file inside it.")
    if not stat.S_ISREG(info.st_mode):
        raise ModelError(f"{path} is not a regular file; name a .gguf file.")
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ModelError(f"{path} is empty; download it again.")
            return _Reader(path, file, size).header()
    except OSError as error:
        raise ModelError(_cannot_open(path, error)) from error


def _cannot_open(path: Path, error: OSError) -> str:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return f"There is no model file at {path}; check the path."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"{path} may not be read by this user; change its permissions (chmod u+r)."
    return f"{path} cannot be read ({error.strerror}); check the disk and --model."


class _Reader:
    """Walks through one header. Grows its copy of the file's beginning only as needed."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path = path
        self._file = file
        self._size = size
        self._data = bytearray()
        self._at = 0

    def header(self) -> GgufHeader:
        """Read everything up to the tensors' data, and check that the data is there."""
        version = self._preamble()
        n_tensors, n_keys = self._take("<QQ")
        if n_tensors > _MAX_TENSORS or n_keys > _MAX_KEYS:
            raise self._damaged(f"it claims {n_tensors} tensors and {n_keys} keys")
        metadata: dict[str, Value] = {}
        for _ in range(n_keys):
            key = self._string(limit=1 << 16)
            kind = self._take("<I")[0]
            value = self._value(kind, distinct=key == _TOKENS)
            if isinstance(value, str) and key is not None and not key.startswith(_VERBATIM):
                value = one_line(value)
            if value is not None and key is not None:
                metadata[one_line(key)] = value
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged(f"its alignment is {alignment!r}")
        entries = [self._tensor(alignment) for _ in range(n_tensors)]
        data_start = (self._at + alignment - 1) // alignment * alignment
        if entries:
            end, name = max((offset + tensor.n_bytes, tensor.name) for offset, tensor in entries)
            if data_start + end > self._size:
                raise ModelError(
                    f"{self._path} is truncated: tensor {name!r} ends at byte"
                    f" {data_start + end}, the file at {self._size}; download it again."
                )
        tensors = tuple(tensor for _, tensor in entries)
        return GgufHeader(self._path, (self._path,), version, metadata, tensors, self._size)

    def _preamble(self) -> int:
        head = self._peek(64)
        if head[:4] != _MAGIC:
            for begin, what in _OTHER_FORMATS:
                if head.startswith(begin):
                    raise ModelError(f"{self._path} is not a GGUF model but {what}.")
            if head[8:9] == b"{":
                raise ModelError(
                    f"{self._path} is not a GGUF model but a safetensors file; convert it with"
                    " llama.cpp's convert_hf_to_gguf.py."
                )
            if _MAGIC.startswith(head):
                raise self._truncated()
            raise ModelError(f"{self._path} is not a GGUF model; name a .gguf file.")
        self._at = 4
        (version,) = self._take("<I")
        if version in _VERSIONS:
            return int(version)
        if int.from_bytes(struct.pack("<I", version), "big") in _VERSIONS:
            raise ModelError(
                f"{self._path} was made for big-endian machines; get the little-endian file."
            )
        raise ModelError(
            f"{self._path} is GGUF version {version}, and versions 2 and 3 can be read here;"
            " get a newer file of this model, or a newer uma-trio."
        )

    def _value(self, kind: int, *, distinct: bool) -> Value | None:
        """Read one value; None if it is of no use here."""
        if kind in _SCALARS:
            return self._take("<" + _SCALARS[kind])[0]
        if kind == _STRING:
            return self._string(limit=None)
        if kind != _ARRAY:
            raise self._damaged(f"a value has the type {kind}")
        item, count = self._take("<IQ")
        if item == _STRING:
            self._skip_strings(count, distinct=distinct)
            return None
        if item not in _SCALARS:
            raise self._damaged(f"an array has items of type {item}")
        layout = f"<{count}{_SCALARS[item]}" if count <= _MAX_KEPT_NUMBERS else None
        if layout is None or _SCALARS[item] in "fd":
            self._skip(count * struct.calcsize("<" + _SCALARS[item]))
            return None
        return tuple(int(number) for number in self._take(layout))

    def _string(self, limit: int | None) -> str | None:
        """Read a string; None if it is too long to keep."""
        (length,) = self._take("<Q")
        if limit is not None and length > limit:
            raise self._damaged(f"a name has {length} bytes")
        start = self._at
        self._skip(length)
        if length > _MAX_KEPT:
            return None
        return self._data[start : start + length].decode("utf-8", "replace")

    def _skip_strings(self, count: int, *, distinct: bool) -> None:
        """Step over an array of strings; the hot loop for a vocabulary of 152k.

        With `distinct` all of them must differ, but for empty ones: llama.cpp ends the process
        on a vocabulary that has a token twice (llama-vocab.cpp, load).
        """
        if count > _MAX_STRINGS or count * 8 > self._size - self._at:
            raise self._damaged(f"an array claims {count} strings")
        length = struct.Struct("<Q").unpack_from
        data, at, have = self._data, self._at, len(self._data)
        begins = [at]
        note = begins.append if distinct else None
        for _ in range(count):
            if at + 8 > have:
                self._at = at
                self._need(8)
                have = len(data)
            at += 8 + length(data, at)[0]
            if note is not None:
                note(at)
        self._at = at
        self._need(0)
        if distinct:
            self._check_distinct(begins)

    def _check_distinct(self, begins: Sequence[int]) -> None:
        """Compare strings that are not empty, by where each begins (its length) and the next."""
        first = begins[0]
        copy = bytes(self._data[first : begins[-1]])
        ends = [begin - first for begin in begins]
        whole = [copy[a:b] for a, b in pairwise(ends) if b - a > 8]
        if len(set(whole)) < len(whole):
            twice = Counter(whole).most_common(1)[0][0][8:]
            raise self._damaged(f"its vocabulary has the token {twice!r} twice")

    def _tensor(self, alignment: int) -> tuple[int, Tensor]:
        """Read one tensor's entry; return where its data begins, and the tensor."""
        name = one_line(self._string(limit=1 << 16) or "")
        (n_dims,) = self._take("<I")
        if n_dims > _MAX_DIMS:
            raise self._damaged(f"tensor {name!r} has {n_dims} dimensions")
        dims = self._take(f"<{n_dims}Q")
        kind, offset = self._take("<IQ")
        if offset % alignment:
            raise self._damaged(f"tensor {name!r} is not aligned")
        if kind in _REMOVED:
            raise ModelError(
                f"{self._path} uses a quantisation that llama.cpp has removed (type {kind});"
                " get the model as Q4_0 or Q4_K_M."
            )
        if kind not in _BLOCKS:  # newer than this table: llama.cpp will judge
            return offset, Tensor(name, 0, kind)
        per_block, block_bytes = _BLOCKS[kind]
        elements = 1
        for dim in dims:
            elements *= dim
        if elements == 0 or (dims and dims[0] % per_block) or elements >= 1 << 62:
            raise self._damaged(f"tensor {name!r} has the shape {dims}")
        return offset, Tensor(name, elements // per_block * block_bytes, kind)

    def _take(self, layout: str) -> tuple[int, ...]:
        size = struct.calcsize(layout)
        self._need(size)
        values = struct.unpack_from(layout, self._data, self._at)
        self._at += size
        return values

    def _skip(self, length: int) -> None:
        self._need(length)
        self._at += length

    def _peek(self, length: int) -> bytes:
        self._need(min(length, self._size))
        return bytes(self._data[:length])

    def _need(self, length: int) -> None:
        """See that `length` more bytes are in memory. Raises if the file does not have them."""
        end = self._at + length
        if end <= len(self._data):
            return
        if end > self._size:
            raise self._truncated()
        if end > _MAX_HEADER:
            raise self._damaged(f"its header is longer than {_MAX_HEADER >> 20} MiB")
        target = min(self._size, max(end, 2 * len(self._data), _CHUNK))
        while len(self._data) < target:
            part = self._file.read(target - len(self._data))
            if not part:  # shrunk while we read it
                raise self._truncated()
            self._data += part

    def _truncated(self) -> ModelError:
        return ModelError(
            f"{self._path} is truncated: its header goes on beyond the end of the file;"
            " download it again."
        )

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._path} is damaged ({what}); download it again.")


_TEMPLATE = "tokenizer.chat_template"


def facts_of_file(path: Path) -> ModelFacts:
    """Return what a model's file says, in the words of llama.cpp. Raises :class:`ModelError`.

    Reading takes some tenths of a second for the largest vocabularies.
    """
    return facts_of(read_header(path))


def facts_of(header: GgufHeader) -> ModelFacts:
    """Return what a header says; `description` is the name of the file, which has the type of its weights."""
    template = header.metadata.get(_TEMPLATE)
    metadata = {
        key: _text(value)
        for key, value in header.metadata.items()
        if not isinstance(value, tuple) and not key.startswith("tokenizer.")
    }
    return ModelFacts(
        name=header.name,
        description=one_line(header.path.stem).upper().replace("-", " ").replace(".", " "),
        n_vocab=header.number("vocab_size"),
        n_ctx_train=header.number("context_length"),
        n_params=sum(tensor.n_elements for tensor in header.tensors),
        size_bytes=sum(tensor.n_bytes for tensor in header.tensors),
        n_embd=header.number("embedding_length"),
        chat_template=template if isinstance(template, str) else None,
        path=str(header.path),
        metadata=metadata,
    )


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
