"""Bad input: exit code 2 and one line on stderr that says what would be accepted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_checkpoint import edit_json, edit_tensors, folder_bytes, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")
VERBS = ("probe", "plan", "build", "quantize", "inspect", "verify", "run", "serve")


@pytest.fixture
def places(tiny_llama: Path, tiny_low_bit: Path, tmp_path: Path) -> dict[str, Path]:
    """What the words FLOAT, LOW, ... stand for in the tables below."""
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "odd.json").write_text('{"arch": "x86_64", "cores": 4}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "file.txt").write_text("text")
    return {
        "FLOAT": tiny_llama,
        "LOW": tiny_low_bit,
        "NEW": tmp_path / "new",
        "NONE": tmp_path / "none",
        "DIR": tmp_path,
        "BADJSON": tmp_path / "bad.json",
        "ODDJSON": tmp_path / "odd.json",
        "LISTJSON": tmp_path / "list.json",
        "TEXT": tmp_path / "file.txt",
    }


def run_line(run: Callable[..., Any], places: dict[str, Path], line: str) -> Any:
    return run(*(str(places.get(word, word)) for word in line.split()))


def only_line(ran: Any, code: int = 2) -> str:
    """The one line of stderr; nothing else may be there, and no traceback anywhere."""
    assert ran.code == code, ran.err
    lines = [line for line in ran.err.splitlines() if line.strip()]
    assert len(lines) == 1, ran.err
    assert lines[0].startswith("weightpath: ")
    assert "Traceback" not in ran.out + ran.err
    return lines[0]


TABLE = [
    ("abacus", "No such command 'abacus'"),
    ("quantise FLOAT -o NEW", "No such command 'quantise'"),
    ("--abacus", "No such option"),
    # a verb's own arguments
    ("plan", "Missing argument"),
    ("quantize FLOAT", "Missing option '-o'"),
    ("verify LOW", "Missing option '--reference'"),
    ("plan FLOAT more", "unexpected extra argument"),
    ("plan FLOAT --abacus", "No such option: --abacus"),
    ("plan FLOAT --head x", "Invalid value for '--head'"),
    # the model
    ("plan NONE", "no such folder or file"),
    ("quantize NONE -o NEW --scheme int8", "no such folder or file"),
    ("build NONE", "no such folder or file"),
    ("plan TEXT", "is a .txt file"),
    ("plan DIR", "config.json: is missing"),
    ("plan LOW", "already quantized (compressed-tensors)"),
    ("quantize LOW -o NEW --scheme int8", "already quantized"),
    ("build LOW -o NEW", "already quantized"),
    # schemes, heads, groups
    ("quantize FLOAT -o NEW --scheme w9", "9 bits; weights take 2 to 8 bits"),
    ("quantize FLOAT -o NEW --scheme 4bit", "scheme '4bit': unknown; write int8, or"),
    ("quantize FLOAT -o NEW --scheme w4g7", "group size 7: divides no in_features"),
    ("quantize FLOAT -o NEW --scheme w4g0", "group size 0"),
    ("quantize FLOAT -o NEW --scheme w3g64", "makes int8 (w8) and 4-bit linears"),
    ("quantize FLOAT -o NEW --scheme w4g64 --head 5", "head of 5 bits: use 16, 8 or 4"),
    ("quantize FLOAT -o NEW --scheme int8 --head 4", "head of 4 bits beside int8 linears"),
    ("quantize FLOAT -o NEW --scheme w4g64 --group-size 32", "beside scheme w4g64"),
    ("quantize FLOAT -o NEW --group-size 7", "group size 7: divides no in_features"),
    ("quantize FLOAT -o NEW --scheme w4g64 --runtime abacus", "runtime 'abacus': unknown"),
    ("plan FLOAT --head 5", "head of 5 bits"),
    ("plan FLOAT --group-size 7", "group size 7"),
    ("plan FLOAT --priority style", "priority 'style': unknown; use speed or fidelity"),
    ("plan FLOAT --runtime abacus", "runtime 'abacus': unknown; use one of weightpath, vllm"),
    ("build FLOAT -o NEW --runtime abacus", "runtime 'abacus': unknown"),
    # folders
    ("quantize FLOAT -o LOW --scheme int8", "exists already; name another folder, or"),
    ("quantize FLOAT -o TEXT --scheme int8", "exists and is no checkpoint"),
    ("quantize FLOAT -o DIR --scheme int8 --overwrite", "exists and is no checkpoint"),
    ("quantize FLOAT -o FLOAT --scheme int8 --overwrite", "holds the model that it would be"),
    ("build FLOAT -o LOW", "exists already"),
    ("build FLOAT -o NEW --text NONE", "text file"),
    ("build FLOAT -o NEW --windows 1", "an interval needs 2"),
    ("inspect NONE", "none: does not exist"),
    ("inspect DIR", "config.json: is missing"),
    ("inspect TEXT", "is not a .safetensors file"),
    ("run NONE --prompt x", "none: does not exist"),
    ("run FLOAT --prompt x", "holds float weights; quantize it first: weightpath quantize"),
    ("verify FLOAT --reference FLOAT", "holds float weights; quantize it first"),
    ("verify LOW --reference LOW", "already quantized"),
    ("verify LOW --reference NONE", "no such folder or file"),
    # devices
    ("plan FLOAT --device abacus", "device 'abacus': no such file and no shipped profile"),
    ("plan FLOAT --device BADJSON", "not JSON, line 1"),
    ("plan FLOAT --device ODDJSON", "cores"),
    ("plan FLOAT --device LISTJSON", "list.json"),
    ("probe --device BADJSON", "not JSON"),
    ("probe --root NONE", "no such folder"),
    ("quantize FLOAT -o NEW --device abacus", "device 'abacus'"),
    ("run LOW --prompt x --device abacus --no-cache", "device 'abacus' cannot be used"),
    ("verify LOW --reference FLOAT --device abacus", "device 'abacus' cannot be used"),
    # measuring
    ("verify LOW --reference FLOAT --text NONE", "text file"),
    ("verify LOW --reference FLOAT --prompts NONE", "prompts"),
    ("verify LOW --reference FLOAT --compute int8", "compute 'int8': use float32 or bfloat16"),
    ("verify LOW --reference FLOAT --windows 0", "'--windows'"),
    ("verify LOW --reference FLOAT --windows 1", "needs 2"),
    ("verify LOW --reference FLOAT --text TEXT", "give a longer text"),
    # answering
    ("run LOW", "give --prompt TEXT or --interactive"),
    ("run LOW --prompt x --interactive --no-cache", "one of them"),
    ("run LOW --prompt x --prompts-file y --no-cache", "one of them"),
    ("run LOW --prompts-file NONE --no-cache", "cannot be read"),
    ("run LOW --prompt x --top-k -1 --no-cache", "'--top-k'"),
    ("run LOW --prompt x --min-p 2 --no-cache", "'--min-p'"),
    ("run LOW --prompt x --repetition-penalty 0 --no-cache", "'--repetition-penalty'"),
    ("run LOW --prompt x --temperature 1e-9 --no-cache", "use 0 (greedy), or 0.001"),
    ("run LOW --prompt x --context 4 --no-cache", "and the context is 4"),
    ("run LOW --prompt x --context 99999 --no-cache", "the model takes 1 to"),
    ("serve NONE", "none: does not exist"),
    ("serve FLOAT", "holds float weights; quantize it first"),
    ("serve LOW --host no.such.host.invalid", "use another --port or --host"),
    ("serve LOW --port 0 --context 99999 --no-cache", "the model takes 1 to"),
    ("run LOW --prompt x --max-tokens 0 --no-cache", "'--max-tokens'"),
    ("run LOW --prompt x --temperature -1 --no-cache", "'--temperature'"),
    ("run LOW --prompt x --temperature nan --no-cache", "'--temperature'"),
    ("run LOW --prompt x --top-p 2 --no-cache", "'--top-p'"),
    ("run LOW --prompt x --activation-bits 3 --no-cache", "3-bit activations; use 8 or 16"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "said"), TABLE, ids=[line for line, _ in TABLE])
def test_bad_input_is_code_2_and_one_line(
    weightpath_cli: Callable[..., Any], places: dict[str, Path], line: str, said: str
) -> None:
    ran = run_line(weightpath_cli, places, line)
    assert said in only_line(ran)
    assert not places["NEW"].exists()
    assert not places["NEW"].with_name("new.partial").exists()


OF_VERBS = [line for line, _ in TABLE if line.split()[0] in VERBS and "--json" not in line]


@pytest.mark.parametrize("line", OF_VERBS)
def test_bad_input_with_json_prints_no_half_document(
    weightpath_cli: Callable[..., Any], places: dict[str, Path], line: str
) -> None:
    ran = run_line(weightpath_cli, places, line + " --json")
    only_line(ran)
    assert ran.out == ""


@pytest.mark.parametrize(
    "line",
    [
        "quantize FLOAT -o NEW --scheme w9",
        "run FLOAT --prompt x",
        "verify FLOAT --reference FLOAT",
        "build NONE",
    ],
)
def test_a_verb_that_shows_progress_leaves_no_blank_line(
    weightpath_cli: Callable[..., Any], places: dict[str, Path], line: str
) -> None:
    ran = run_line(weightpath_cli, places, line)
    assert ran.err == only_line(ran) + "\n"


def test_ctrl_c_is_one_line_that_says_what_is_kept(
    weightpath_cli: Callable[..., Any], tiny_llama: Path, tmp_path: Path, ctrl_c: None
) -> None:
    ran = weightpath_cli("quantize", tiny_llama, "-o", tmp_path / "out", "--scheme", "int8")
    assert "interrupted; what was finished is kept" in only_line(ran, 130)


def test_ctrl_c_is_130_and_the_next_run_goes_on(
    weightpath_cli: Callable[..., Any], tiny_llama: Path, tmp_path: Path, ctrl_c: None
) -> None:
    arguments = ("quantize", tiny_llama, "-o", tmp_path / "out", "--scheme", "int8")
    ran = weightpath_cli(*arguments)
    assert ran.code == 130
    assert "Traceback" not in ran.out + ran.err
    assert not (tmp_path / "out").exists()
    ran = weightpath_cli(*arguments)
    assert ran.code == 0
    assert "3 tensors were finished by an earlier run and kept" in " ".join(ran.out.split())


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first quantizing is interrupted at its third tensor, as by Ctrl-C."""
    from weightpath.jobs import quantize as room

    real, count = room._make, [0]

    def make(*arguments: Any) -> Any:
        count[0] += 1
        if count[0] == 4:
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(room, "_make", make)


def test_a_hub_id_that_is_out_of_reach_is_one_clear_line(
    weightpath_cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    line = only_line(weightpath_cli("plan", "nobody/no-such-model"))
    assert "model 'nobody/no-such-model': no such folder, and not from the hub" in line


def test_a_number_that_is_none_names_tensor_and_index_and_leaves_nothing(
    weightpath_cli: Callable[..., Any], tiny_llama: Path, tmp_path: Path
) -> None:
    source = Path(shutil.copytree(tiny_llama, tmp_path / "source"))

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][17, 5] = float("nan")

    edit_tensors(source, spoil)
    ran = weightpath_cli("quantize", source, "-o", tmp_path / "out", "--scheme", "w4g64")
    line = only_line(ran)
    assert "tensor model.layers.1.mlp.up_proj.weight: element [17, 5] is nan" in line
    assert not (tmp_path / "out").exists()


def test_a_missing_tokenizer_is_named_by_every_verb_that_needs_it(
    weightpath_cli: Callable[..., Any], tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", chat=None)
    low = tmp_path / "low"
    assert weightpath_cli("quantize", source, "-o", low, "--scheme", "int8").code == 0
    for line in (
        ("verify", low, "--reference", source),
        ("build", source, "-o", tmp_path / "built"),
    ):
        assert "has no tokenizer that loads" in only_line(weightpath_cli(*line))
    ran = weightpath_cli("run", low, "--prompt", "x")  # after the bar of loading the model
    assert ran.code == 2
    assert "has no tokenizer that loads" in ran.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "abacus"}, "model_type 'abacus' is unknown to transformers"),
        ({"hidden_size": "64"}, "config.json makes no LlamaForCausalLM model"),
        ({"vocab_size": 99}, "wants (99, 64)"),
        ({"num_hidden_layers": 3}, "model.layers.2."),
        ({"num_hidden_layers": 1}, "has no place in LlamaForCausalLM"),
    ],
    ids=str,
)
def test_a_config_that_is_not_the_models_is_one_clear_line(
    weightpath_cli: Callable[..., Any],
    tiny_llama: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    said: str,
) -> None:
    source = Path(shutil.copytree(tiny_llama, tmp_path / "source"))
    edit_json(source / "config.json", **changes)
    assert said in only_line(weightpath_cli("plan", source))
    ran = weightpath_cli("quantize", source, "-o", tmp_path / "out", "--scheme", "int8")
    assert said in only_line(ran)


def test_a_folder_that_cannot_be_written_is_one_clear_line(
    weightpath_cli: Callable[..., Any], tiny_llama: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    ran = weightpath_cli("quantize", tiny_llama, "-o", tmp_path / "file" / "out", "--scheme", "w8")
    assert "Not a directory" in only_line(ran)


def test_the_users_files_survive_every_bad_line(
    weightpath_cli: Callable[..., Any], places: dict[str, Path]
) -> None:
    before = {name: folder_bytes(places[name]) for name in ("FLOAT", "LOW", "DIR")}
    for line, _ in TABLE:
        if line.startswith("quantize"):
            run_line(weightpath_cli, places, line)
    assert before == {name: folder_bytes(places[name]) for name in ("FLOAT", "LOW", "DIR")}
