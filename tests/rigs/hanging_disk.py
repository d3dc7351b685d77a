"""A file system that hangs when it is told to, as NFS or a dying drive does: FUSE over a folder, its server stopped.

Needs /dev/fuse and the right to mount. The server speaks the kernel's protocol (`linux/fuse.h`) itself, as much of it
as a disk tier needs. Run as a program, this file is the server.
"""

import contextlib
import ctypes
import errno
import itertools
import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_DEVICE = "/dev/fuse"
_LAZILY = 2
"""MNT_DETACH."""
_HEAD, _ANSWER = struct.Struct("<IIQQIIIHH"), struct.Struct("<IiQ")
_MOST_BYTES = 128 << 10
_NO_CACHE = 1
"""FOPEN_DIRECT_IO: what is read is asked for, not taken from the page cache."""
_NEW_SIZE = 1 << 3
"""FATTR_SIZE."""
_NOT_HERE = "nobody may mount a FUSE file system here"
_libc = ctypes.CDLL(None, use_errno=True)


class HangingDisk:
    """A mounted file system."""

    def __init__(self, folder: Path, server: "subprocess.Popen[bytes]") -> None:
        self.folder = folder
        self._server = server

    def hang(self) -> None:
        """From now on no call to the file system ends."""
        self._server.send_signal(signal.SIGSTOP)
        os.waitpid(self._server.pid, os.WUNTRACED)

    def answer(self) -> None:
        """Lets hanging calls end, and answers all calls that come."""
        self._server.send_signal(signal.SIGCONT)


@contextmanager
def hanging_disk(folder: Path) -> Iterator[HangingDisk]:
    """Mounts one inside an empty folder; skips the test where nobody may. At the end, what hangs fails."""
    import pytest  # not where this file is the server

    behind, mounted = folder / "behind", folder / "mounted"
    behind.mkdir()
    mounted.mkdir()
    try:
        device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        pytest.skip(_NOT_HERE)
    try:
        options = f"fd={device},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},allow_other"
        if _libc.mount(b"kvtier-test", os.fsencode(mounted), b"fuse", 0, options.encode()):
            pytest.skip(_NOT_HERE)
        program = [sys.executable, "-I", "-S", __file__, str(device), str(behind)]
        server = subprocess.Popen(program, pass_fds=[device])
    finally:
        os.close(device)
    try:
        yield HangingDisk(mounted, server)
    finally:
        server.kill()
        server.wait()
        _libc.umount2(os.fsencode(mounted), _LAZILY)


class _Server:
    """One thread: requests, one after the other."""

    def __init__(self, device: int, folder: str) -> None:
        self._device = device
        self._paths = {1: folder}
        """The path of each node."""
        self._nodes = {folder: 1}
        self._new_nodes = itertools.count(2)
        """Numbers that no node has had: the kernel may know a file long after its name is gone."""
        self._verbs: dict[int, Callable[[int, bytes], bytes]] = {
            1: self._lookup, 3: self._getattr, 4: self._setattr, 9: self._mkdir, 10: self._unlink, 14: self._open,
            15: self._read, 16: self._write, 17: self._statfs, 18: self._release, 20: self._sync,
            26: self._init, 27: self._opendir, 28: self._readdir, 29: self._nothing, 30: self._nothing,
            35: self._create, 43: self._fallocate,
        }  # fmt: skip

    def serve(self) -> None:
        """Until the file system is gone."""
        while True:
            try:
                request = os.read(self._device, _MOST_BYTES + 4096)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.EAGAIN, errno.ENOENT):
                    continue
                return
            _, verb, unique, node, *_ = _HEAD.unpack_from(request)
            if verb in (2, 36, 42):  # FORGET, INTERRUPT, BATCH_FORGET: no answer
                continue
            code, answer = 0, b""
            try:
                answer = self._verbs[verb](node, request[_HEAD.size :])
            except KeyError:
                code = errno.ENOSYS
            except OSError as error:
                code = error.errno or errno.EIO
            with contextlib.suppress(FileNotFoundError):  # who asked is gone
                os.write(self._device, _ANSWER.pack(_ANSWER.size + len(answer), -code, unique) + answer)

    def _child(self, node: int, name: bytes) -> str:
        return f"{self._paths[node]}/{os.fsdecode(name.split(bytes(1))[0])}"

    def _entry(self, path: str) -> bytes:
        attributes = self._attributes(path)
        node = self._nodes.get(path) or next(self._new_nodes)
        self._nodes[path] = node
        self._paths[node] = path
        return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + attributes

    @staticmethod
    def _attributes(path: str) -> bytes:
        s = os.stat(path, follow_symlinks=False)
        times = int(s.st_atime), int(s.st_mtime), int(s.st_ctime)
        return struct.pack(
            "<6Q10I", s.st_ino, s.st_size, s.st_blocks, *times, 0, 0, 0,
            s.st_mode, s.st_nlink, s.st_uid, s.st_gid, 0, 4096, 0,
        )  # fmt: skip

    def _init(self, node: int, body: bytes) -> bytes:
        return struct.pack("<IIIIHHIIHHI7I", 7, 31, _MOST_BYTES, 0, 16, 12, _MOST_BYTES, 1, 0, 0, *[0] * 8)

    def _lookup(self, node: int, body: bytes) -> bytes:
        return self._entry(self._child(node, body))

    def _getattr(self, node: int, body: bytes) -> bytes:
        return struct.pack("<QII", 0, 0, 0) + self._attributes(self._paths[node])

    def _setattr(self, node: int, body: bytes) -> bytes:
        valid, _, _, size = struct.unpack_from("<IIQQ", body)
        if valid & _NEW_SIZE:
            os.truncate(self._paths[node], size)
        return self._getattr(node, b"")

    def _mkdir(self, node: int, body: bytes) -> bytes:
        os.mkdir(self._child(node, body[8:]), 0o700)
        return self._entry(self._child(node, body[8:]))

    def _unlink(self, node: int, body: bytes) -> bytes:
        path = self._child(node, body)
        os.unlink(path)
        self._nodes.pop(path, None)
        return b""

    def _open(self, node: int, body: bytes) -> bytes:
        flags = struct.unpack_from("<I", body)[0] & (os.O_ACCMODE | os.O_TRUNC)
        return struct.pack("<QII", os.open(self._paths[node], flags), _NO_CACHE, 0)

    def _create(self, node: int, body: bytes) -> bytes:
        flags, mode = struct.unpack_from("<II", body)
        path = self._child(node, body[16:])
        handle = os.open(path, (flags & ~os.O_DIRECT) | os.O_CREAT, mode)
        self._nodes.pop(path, None)
        return self._entry(path) + struct.pack("<QII", handle, _NO_CACHE, 0)

    def _read(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return os.pread(handle, size, offset)

    def _write(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQI", body)
        return struct.pack("<II", os.pwrite(handle, body[40 : 40 + size], offset), 0)

    def _statfs(self, node: int, body: bytes) -> bytes:
        s = os.statvfs(self._paths[1])
        return struct.pack(
            "<5Q4I6I", s.f_blocks, s.f_bfree, s.f_bavail, s.f_files, s.f_ffree, s.f_bsize, 255, s.f_frsize, *[0] * 7
        )

    def _fallocate(self, node: int, body: bytes) -> bytes:
        handle, offset, size = struct.unpack_from("<QQQ", body)
        os.posix_fallocate(handle, offset, size)
        return b""

    def _sync(self, node: int, body: bytes) -> bytes:
        os.fdatasync(struct.unpack_from("<Q", body)[0])
        return b""

    def _release(self, node: int, body: bytes) -> bytes:
        os.close(struct.unpack_from("<Q", body)[0])
        return b""

    def _opendir(self, node: int, body: bytes) -> bytes:
        return bytes(16)

    def _readdir(self, node: int, body: bytes) -> bytes:
        _, offset, size = struct.unpack_from("<QQI", body)
        answer = b""
        for number, entry in enumerate(sorted(os.scandir(self._paths[node]), key=lambda e: e.name), 1):
            name = os.fsencode(entry.name)
            kind = stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode) >> 12
            record = struct.pack("<QQII", entry.inode(), number, len(name), kind) + name
            record += bytes(-len(record) % 8)
            if number > offset and len(answer) + len(record) <= size:
                answer += record
        return answer

    def _nothing(self, node: int, body: bytes) -> bytes:
        return b""


if __name__ == "__main__":
    _Server(int(sys.argv[1]), sys.argv[2]).serve()
