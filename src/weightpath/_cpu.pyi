"""The compiled kernels, cpp/bind.cpp. Addresses are of contiguous memory; kinds as in
`weightpath.layouts.cpu_tiles.KINDS`."""

def instruction_sets() -> list[tuple[str, str]]: ...
def chosen(wanted: str, rows: int) -> str: ...
def amx_refusal() -> str: ...
def packed_bytes(bits: int, n: int, k: int, group: int, zeros: bool, scales: int) -> int: ...
def pack(
    bits: int,
    n: int,
    k: int,
    group: int,
    has_zeros: bool,
    kind: int,
    codes: int,
    source: int,
    scales: int,
    zeros: int,
    packed: int,
    threads: int,
    /,
) -> None: ...
def linear(
    wanted: str,
    bits: int,
    n: int,
    k: int,
    group: int,
    zeros: bool,
    scales: int,
    packed: int,
    x: int,
    x_kind: int,
    m: int,
    planes: int,
    per_group: bool,
    y: int,
    y_kind: int,
    bias: int,
    bias_kind: int,
    threads: int,
    /,
) -> None: ...
def advise_huge_pages(address: int, bytes: int) -> bool: ...
def read_all(address: int, bytes: int, threads: int) -> int: ...
def burn(wanted: str, rounds: int, threads: int) -> int: ...
def sample(
    logits: int,
    vocabulary: int,
    seen: int,
    seen_count: int,
    repetition_penalty: float,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    uniform: float,
    top: int,
    /,
) -> tuple[bool, int, float, list[tuple[int, float]]]: ...
def set_pinning(pinned: bool) -> None: ...
def workers() -> int: ...
