"""A seccomp filter of the system calls that an untrusted program may not make. Owns the list, and the filter program
that the kernel runs for each call.

The list refuses calls that reach other processes (sockets of any family, tracing). It refuses kernel interfaces with a
history of faults (io_uring, BPF, keys, namespaces, mounts), and memory that is charged to no process (memfd, SysV
segments, shared anonymous mappings). All else is allowed: Python and its libraries make too many kinds of calls for a
list of needed ones.

Numbers: the kernel's unistd.h of each architecture. Filter: linux/seccomp.h and linux/filter.h.
"""

import ctypes
import os
import sys
from errno import EACCES, ENOSYS, EPERM

PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2
RET_ALLOW, RET_ERRNO = 0x7FFF0000, 0x00050000
LOAD, JUMP_EQUAL, JUMP_AT_LEAST, JUMP_ANY_BIT, AND, RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16  # offsets in struct seccomp_data
X32 = 0x40000000  # calls of the x32 interface have this bit
# os.uname().machine: (AUDIT_ARCH, column below). Both are little-endian: an argument's low half comes first.
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}

# fmt: off
REFUSED: dict[int, dict[str, tuple[int | None, int | None]]] = {
    EACCES: {  # no socket is needed: the program has no network, and no business outside
        "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
        "accept4": (288, 242),
    },
    ENOSYS: {  # calls with a fallback, or with arguments that a filter cannot see
        "clone3": (435, 435), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
        "io_uring_register": (427, 427), "memfd_create": (319, 279), "memfd_secret": (447, 447),
        "userfaultfd": (323, 282),
    },
    EPERM: {
        "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
        "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
        "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
        "process_madvise": (440, 440), "process_mrelease": (448, 448), "pidfd_getfd": (438, 438),
        "bpf": (321, 280), "perf_event_open": (298, 241), "seccomp": (317, 277),
        "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
        "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
        "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
        "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105),
        "finit_module": (313, 273), "delete_module": (176, 106), "swapon": (167, 224), "swapoff": (168, 225),
        "reboot": (169, 142), "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, None),
        "ioperm": (173, None), "modify_ldt": (154, None), "acct": (163, 89), "quotactl": (179, 60),
        "quotactl_fd": (443, 443), "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
        "syslog": (103, 116), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
        "clock_adjtime": (305, 266), "personality": (135, 92), "migrate_pages": (256, 238), "move_pages": (279, 239),
        "fanotify_init": (300, 262), "lookup_dcookie": (212, 18), "vhangup": (153, 58), "nfsservctl": (180, 42),
    },
}
# fmt: on
CLONE, SOCKETPAIR, MMAP = (56, 220), (53, 199), (9, 222)
NEW_NAMESPACES = 0x7E020000  # CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
AF_UNIX, SOCK_STREAM, SOCK_SEQPACKET, SOCK_TYPES = 1, 1, 5, 0xF
MAP_SHARED, MAP_ANONYMOUS = 0x01, 0x20  # MAP_SHARED_VALIDATE has the first bit too, MAP_PRIVATE has not


def refuse_system_calls() -> bool:
    """Install the filter for this process and its children, permanently. Needs no_new_privs. False if the system
    refuses it, or the machine is not in MACHINES."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in MACHINES:
        return False
    code = b"".join(program(machine))
    buffer = ctypes.create_string_buffer(code, len(code))

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    filters = Program(len(code) // 8, ctypes.addressof(buffer))
    prctl = ctypes.CDLL(None).prctl
    return bool(prctl(PR_SET_SECCOMP, ctypes.c_ulong(SECCOMP_MODE_FILTER), ctypes.byref(filters), 0, 0) == 0)


def program(machine: str) -> list[bytes]:
    """Return the filter's instructions (struct sock_filter) for one of MACHINES."""
    architecture, column = MACHINES[machine]
    found = [
        _step(LOAD, ARCHITECTURE),
        _step(JUMP_EQUAL, architecture, 1, 0),
        _refuse(EPERM),  # other architectures' interfaces (32-bit x86) have other numbers
        _step(LOAD, NUMBER),
    ]
    if machine == "x86_64":
        found += [_step(JUMP_AT_LEAST, X32, 0, 1), _refuse(ENOSYS)]
    for error, calls in REFUSED.items():
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                found += [_step(JUMP_EQUAL, number, 0, 1), _refuse(error)]
    for numbers, body in (
        (CLONE, [*_argument(0), _step(JUMP_ANY_BIT, NEW_NAMESPACES, 0, 1), _refuse(EPERM)]),
        (MMAP, [*_argument(3, MAP_SHARED | MAP_ANONYMOUS), _step(JUMP_EQUAL, MAP_SHARED | MAP_ANONYMOUS, 0, 1),
                _refuse(EPERM)]),
        # A pair of datagram sockets can be reconnected to any address; these types cannot.
        (SOCKETPAIR, [*_argument(0), _step(JUMP_EQUAL, AF_UNIX, 1, 0), _refuse(EACCES), *_argument(1, SOCK_TYPES),
                      _step(JUMP_EQUAL, SOCK_STREAM, 2, 0), _step(JUMP_EQUAL, SOCK_SEQPACKET, 1, 0),
                      _refuse(EACCES)]),
    ):  # fmt: skip
        body = [*body, _step(RETURN, RET_ALLOW)]
        found += [_step(JUMP_EQUAL, numbers[column], 0, len(body)), *body]
    return [*found, _step(RETURN, RET_ALLOW)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return code.to_bytes(2, sys.byteorder) + bytes((if_true, if_false)) + value.to_bytes(4, sys.byteorder)


def _refuse(error: int) -> bytes:
    return _step(RETURN, RET_ERRNO | error)


def _argument(position: int, mask: int | None = None) -> list[bytes]:
    """Load the low half of an argument."""
    load = _step(LOAD, ARGUMENTS + 8 * position)
    return [load] if mask is None else [load, _step(AND, mask)]
