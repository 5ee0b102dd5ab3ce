"""Names that only differ by a prefix from what the model wants: wrappers left in, or doubled.

    base_model.model.model.layers.0...   PEFT          module.model.layers.0...     DataParallel
    model._orig_mod.layers.0...          torch.compile  model.model.layers.0...     doubled

Which prefix stands for which is found from the names themselves: the pair under which most of the
stored names become names that are missing. Several are found in turn.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from weightpath.checkpoints.audit_finding import Finding, plural, shown
from weightpath.checkpoints.audit_stored import Stored, prediction, tower

WRAPPERS = {
    "base_model.model.": "PEFT's wrapper: merge_and_unload() and save again",
    "module.": "DataParallel's wrapper: save model.module",
    "_orig_mod.": "torch.compile's wrapper: save model._orig_mod",
}
"""What wrappers put into names, and how to save without it."""
_DEEPEST = 4
"""Parts of a name that a prefix may have."""
_ROUNDS = 4
_FEWEST = 3
"""Names that one prefix must explain, where neither prefix ends with the other."""
_DOUBLED = re.compile(r"(?P<prefix>[A-Za-z_]\w{0,60}\.)(?P=prefix)")


def audit_prefixes(
    missing: Sequence[str],
    unexpected: Sequence[str],
    weights: Mapping[str, Stored],
    wanted: Mapping[str, tuple[int, ...]],
) -> tuple[tuple[Finding, ...], set[str], set[str]]:
    """Findings, the wanted names that differ by a prefix alone, and the stored names that they are.

    A name of two parts or more must follow the prefix, and shapes must agree where both are known.
    Towers and extra prediction layers are not taken for the decoder's own.
    """
    towers = any(tower(name) or prediction(name) for name in missing)
    found: list[Finding] = []
    filled: set[str] = set()
    used: set[str] = set()
    for _ in range(_ROUNDS):
        gaps = {name for name in missing if name not in filled}
        left = [
            name
            for name in unexpected
            if name not in used and (towers or not (tower(name) or prediction(name)))
        ]
        pair = _commonest(gaps, left)
        if pair is None:
            break
        stored, model = pair
        matched = {}
        for name in left:
            target = model + name.removeprefix(stored)
            if name.startswith(stored) and target in gaps:
                shape = weights[name].shape
                if shape is None or tuple(shape) == tuple(wanted[target]):
                    matched[name] = target
        nested = stored.endswith(model) or model.endswith(stored)
        if not matched or (len(matched) < _FEWEST and not nested):
            break
        filled.update(matched.values())
        used.update(matched)
        found.append(_finding(stored, model, matched, weights))
    copies = [
        name
        for name in unexpected
        if name not in used and _without(name) != name and _without(name) in weights
    ]
    used.update(copies)
    for name in copies:
        problem = f"and {weights[_without(name)].source} are one weight under two names"
        mend = "remove the one with the prefix"
        found.append(Finding("error", weights[name].source, problem, mend, "stored twice"))
    return tuple(found), filled, used


def audit_wrappers(weights: Mapping[str, Stored]) -> tuple[Finding, ...]:
    """Wrappers' and doubled prefixes, where the model's own names are not known."""
    groups: dict[str, list[str]] = {}
    for name in weights:
        prefix = _wrapper(name)
        if prefix:
            groups.setdefault(prefix, []).append(name)
    return tuple(
        Finding(
            "warning",
            weights[names[0]].source,
            f"{plural(len(names), 'name')} of {len(weights)} hold {prefix!r}",
            WRAPPERS.get(prefix, "rename them, if the model has no such prefix"),
            f"foreign prefix {prefix}",
        )
        for prefix, names in groups.items()
    )


def _commonest(missing: Iterable[str], unexpected: Iterable[str]) -> tuple[str, str] | None:
    """The pair of prefixes (stored, model) that turns most unexpected names into missing ones."""
    endings: dict[str, list[str]] = {}
    for name in missing:
        for prefix, rest in _splits(name):
            endings.setdefault(rest, []).append(prefix)
    counts: Counter[tuple[str, str]] = Counter()
    for name in unexpected:
        for prefix, rest in _splits(name):
            if rest in endings:
                counts.update((prefix, other) for other in endings[rest][:_DEEPEST])
                break
    return counts.most_common(1)[0][0] if counts else None


def _splits(name: str) -> Iterable[tuple[str, str]]:
    """(prefix, rest) with prefixes of 0 to _DEEPEST parts, and two parts or more in the rest."""
    start = 0
    for _ in range(_DEEPEST + 1):
        if "." not in name[start:]:
            return
        yield name[:start], name[start:]
        start = name.index(".", start) + 1


def _finding(
    stored: str, model: str, matched: Mapping[str, str], weights: Mapping[str, Stored]
) -> Finding:
    first = next(iter(matched))
    wrapper = _wrapper(first)
    if wrapper not in WRAPPERS and _DOUBLED.match(wrapper):
        stored, model = wrapper, wrapper[: len(wrapper) // 2]
    has = f"start with {stored!r}" if stored else f"lack {model!r} before them"
    wants = (
        ""
        if not stored
        else f", the model wants {model!r}"
        if model
        else ", the model has no such prefix"
    )
    mend = WRAPPERS.get(wrapper, f"rename them: {shown(matched[first])}, not {shown(first)}")
    return Finding(
        "error",
        weights[first].source,
        f"{plural(len(matched), 'name')} {has}{wants}",
        mend,
        f"foreign prefix {stored or f'(none, wanted {model})'}",
    )


def _wrapper(name: str) -> str:
    """The wrapper's prefix in a name, or a doubled one, or nothing."""
    for prefix in WRAPPERS:
        if name.startswith(prefix) or (prefix == "_orig_mod." and "._orig_mod." in name):
            return prefix
    doubled = _DOUBLED.match(name)
    return doubled[0] if doubled else ""


def _without(name: str) -> str:
    """A name without its wrapper's prefix, or with a doubled one once."""
    prefix = _wrapper(name)
    if prefix == "_orig_mod.":
        return name.replace(prefix, "")
    doubled = _DOUBLED.match(prefix)
    return name.replace(prefix, doubled["prefix"] if doubled else "", 1) if prefix else name
