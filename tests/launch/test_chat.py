"""`paceline chat`: answers are the model's own, the conversation is the template's, and what cannot be is said."""

import fcntl
import io
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from contracts.rollout import FinishReason, Rollout
from launch.commands.chat import Chat, Pieces
from launch.commands.chat import chat as converse
from launch.commands.cli import app
from launch.config import Config
from launch.errors import PacelineError
from launch.interrupt import Interrupt
from models.checkpoint import init_model, save_model
from tests.data.conftest import CHAT_TEMPLATE
from tests.data.conftest import tokenizer_folder as tokenizer_folder  # the fixture: bytes as tokens
from tests.learner.tiny import CONFIG

ROOT = Path(__file__).parents[2]
SYSTEM = "Brief."
GREEDY = {"temperature": 0.0, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Path:
    """A finished run, whose model has a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "run"
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder / "tokenizer")
    (folder / "shape").mkdir()
    shape = CONFIG | {"vocab_size": 257, "max_position_embeddings": 256, "initializer_range": 0.3}
    (folder / "shape/config.json").write_text(json.dumps(shape))
    model = init_model(folder / "shape", seed=3, dtype=torch.float32, device="cpu", batch_invariant=True)
    save_model(model, folder / "model", tokenizer_dir=folder / "tokenizer")
    config = {
        "run": {"name": "run", "dir": str(folder.parent)},
        "model": {"path": str(folder / "gone")},
        "data": {"train": "t", "system_prompt": SYSTEM},
        "rollout": {"sampling": {"temperature": 0.8, "max_new_tokens": 12}},
        "reward": {"terms": [{"kind": "math"}]},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def config_of(run: Path, **sampling: Any) -> Config:
    from launch.commands.eval_target import find

    config = find(run, []).config
    drawn = config.rollout.sampling.model_copy(update=sampling)
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"sampling": drawn})})


def said(chat: Chat, prompt: str) -> tuple[str, Rollout]:
    *pieces, rollout = chat.answer(prompt, Interrupt())
    assert isinstance(rollout, Rollout)
    return "".join(map(str, pieces)), rollout


def invoked(*arguments: str, typed: str = "") -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["chat", *arguments], input=typed)
    return result.exit_code, result.stdout, result.stderr


def test_greedy_answers_are_those_of_transformers_on_the_whole_conversation(run: Path) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(run / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    chat = Chat(config_of(run, **GREEDY))
    messages = [{"role": "system", "content": SYSTEM}]
    for prompt in ("one", "and two?"):
        messages.append({"role": "user", "content": prompt})
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        made = theirs.generate(tokens, max_new_tokens=12, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        answer, rollout = said(chat, prompt)
        assert rollout.tokens.tolist() == made[0, tokens.shape[1] :].tolist()
        assert answer == tokenizer.decode(rollout.tokens, skip_special_tokens=True)
        messages.append({"role": "assistant", "content": answer})


def test_single_prompts_and_new_conversations_know_nothing_of_what_was_said(run: Path) -> None:
    first, second = "one", "two"
    apart, together = Chat(config_of(run, **GREEDY), single=True), Chat(config_of(run, **GREEDY))
    alone = [said(apart, prompt)[0] for prompt in (first, second)]
    assert said(together, first)[0] == alone[0]
    assert said(together, second)[0] != alone[1]
    together.new()
    assert said(together, second)[0] == alone[1]


def test_a_characters_bytes_are_held_back_until_it_is_whole(run: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(run / "model")
    text = "na\u00efve \U0001f642 \u4f60\u597d."
    tokens = tokenizer(text, add_special_tokens=False, return_tensors="np").input_ids[0]
    assert len(tokens) == len(text.encode())
    pieces = Pieces(tokenizer)
    shown = [pieces.add(tokens[i : i + 1]) for i in range(len(tokens) - 2)]
    assert all(len(piece) <= 1 and "\ufffd" not in piece for piece in shown)
    assert "".join(shown) + pieces.rest(tokens) == text
    assert Pieces(tokenizer).rest(tokens[:-3]).endswith("\ufffd"), "a response that ends within one"


def test_it_draws_as_the_run_did_and_says_what_was_cut(run: Path) -> None:
    code, answer, notes = invoked(str(run), "--prompt", "one")
    assert (code, notes) == (0, "[cut at 12 tokens; --max-tokens 48 lets it write more]\n")
    assert (code, answer, notes) == invoked(str(run), "--prompt", "one")
    assert invoked(str(run), "--prompt", "one", "run.seed=1")[1] != answer
    greedy = Chat(config_of(run, **GREEDY))
    expected = said(greedy, "one")[0]
    assert invoked(str(run), "--prompt", "one", "--temperature", "0")[1] == f"{expected}\n"
    assert expected.startswith(invoked(str(run), "--prompt", "one", "--temperature", "0", "--max-tokens", "3")[1][:2])


def test_lines_of_a_pipe_are_a_conversation_with_new_ones_between(run: Path) -> None:
    code, answers, _ = invoked(str(run), "--temperature", "0", typed="one\n\n and two? \n/new\none\n")
    chat = Chat(config_of(run, **GREEDY))
    first, second = said(chat, "one")[0], said(chat, "and two?")[0]
    assert (code, answers) == (0, f"{first}\n{second}\n{first}\n")
    code, answers, _ = invoked(str(run), "--temperature", "0", "--single", typed="one\none\n")
    assert (code, answers) == (0, f"{first}\n{first}\n")


def test_an_answer_that_is_stopped_is_part_of_the_conversation(run: Path) -> None:
    chat, interrupt = Chat(config_of(run, **GREEDY)), Interrupt()
    pieces = chat.answer("one", interrupt)
    beginning = next(pieces)
    interrupt.requested = True
    *_, rollout = pieces
    assert isinstance(rollout, Rollout)
    assert (rollout.finish_reason, len(rollout.tokens) < 12) == (FinishReason.ABORT, True)
    assert chat.cut(rollout) == ""
    assert said(chat, "two")[1].finish_reason is not FinishReason.ABORT
    assert isinstance(beginning, str)


def test_a_conversation_beyond_the_models_limit_is_refused_and_a_new_one_is_not(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chat = Chat(config_of(run, **GREEDY))
    with pytest.raises(PacelineError, match="leaves no room"):
        said(chat, "x" * 300)
    assert said(chat, "one")[0] == said(Chat(config_of(run, **GREEDY)), "one")[0]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{'x' * 300}\none\n"))
    converse(config_of(run, **GREEDY), "it")
    told = capsys.readouterr()
    assert len(told.out.splitlines()) >= 1
    assert "leaves no room" in told.err
    assert "/new" in told.err


def test_plain_prompts_stand_alone(run: Path, tmp_path: Path) -> None:
    config = config_of(run, **GREEDY)
    data = config.data.model_copy(update={"template": "plain", "system_prompt": None})
    chat = Chat(config.model_copy(update={"data": data}))
    assert chat.single
    assert said(chat, "one")[0] == said(chat, "one")[0]


def test_what_cannot_be_asked_is_named_with_a_remedy(run: Path, tmp_path: Path, tokenizer_folder: Path) -> None:
    code, _, error = invoked(str(tmp_path / "nowhere"), "--prompt", "x")
    assert code == 2
    assert "is neither a configuration file nor the folder of a run" in " ".join(error.split())
    (tmp_path / "a-run").mkdir()
    assert "did you mean" in invoked(str(tmp_path / "a-runn"), "--prompt", "x")[2]
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    (unfinished / "config.yaml").write_text((run / "config.yaml").read_text())
    code, _, error = invoked(str(unfinished), "--prompt", "x")
    assert code == 2
    assert "no model and no checkpoint in" in error
    assert "checkpoint.every=" in error
    assert "no best model in" in invoked(str(unfinished), "--best", "--prompt", "x")[2]
    untemplated = tmp_path / "untemplated"
    untemplated_copy(run / "model", untemplated, tokenizer_folder)
    code, _, error = invoked(str(untemplated), "--prompt", "x")
    assert code == 1
    assert "has no chat template: use data.template=plain" in " ".join(error.split())
    assert invoked(str(untemplated), "--prompt", "x", "data.template=plain", "--max-tokens", "2")[0] == 0


def untemplated_copy(model: Path, to: Path, tokenizer_folder: Path) -> None:
    """The model with a tokenizer that has no chat template."""
    loaded = init_model(model, seed=3, dtype=torch.float32, device="cpu", batch_invariant=True)
    save_model(loaded, to, tokenizer_dir=tokenizer_folder)


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "end", [pytest.param(b"\x04", id="ctrl-d"), pytest.param(b"\x03", id="ctrl-c", marks=pytest.mark.long)]
)
def test_a_terminal_is_greeted_and_ended_by_a_key(run: Path, end: bytes) -> None:
    """The program itself behind a pseudo-terminal."""
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "launch", "chat", str(run), "--temperature", "0", "--max-tokens", "12"]
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TERM": "dumb"},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    seen = b""

    def until(text: bytes, times: int = 1) -> None:
        nonlocal seen
        deadline = time.monotonic() + 120
        while seen.count(text) < times and time.monotonic() < deadline:
            seen += os.read(main, 4096)
        assert seen.count(text) >= times, seen

    try:
        until(b"\n> ")
        assert b"temperature 0, at most 12 tokens" in seen
        os.write(main, b"one\n")
        until(b"cut at 12 tokens")
        until(b"\n> ", times=2)
        # CPython misses a key between its prompt and its wait for one until the next is pressed.
        for left in reversed(range(6)):
            os.write(main, end)
            try:
                assert child.wait(15) == 0
                break
            except subprocess.TimeoutExpired:
                assert left, seen
    finally:
        child.kill()
        child.wait()
        os.close(main)


def test_a_signal_that_ends_processes_ends_it(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM in the middle of an answer; Ctrl-C too, where there is no terminal to go on at."""
    answer = Chat.answer
    for number in (signal.SIGTERM, signal.SIGINT):

        def interrupted(self: Chat, prompt: str, interrupt: Interrupt, number: int = number) -> Any:
            os.kill(os.getpid(), number)
            return answer(self, prompt, interrupt)

        monkeypatch.setattr(Chat, "answer", interrupted)
        code, _, error = invoked(str(run), "--prompt", "one")
        assert code == 130
        assert "interrupted" in error
