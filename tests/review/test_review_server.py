import os
import signal
import socket
import time
from importlib import util

import pytest
import uvicorn

from processes import wait_for_address
from pseudoloss.cli import main
from pseudoloss.errors import InputError
from pseudoloss.review import server
from pseudoloss.review.server import listen, serve
from review_runs import lines_of


@pytest.fixture
def started(monkeypatch):
    """`serve` returns instead of waiting; the configurations that were served."""
    configurations = []
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: configurations.append(self))
    return configurations


def test_it_prints_its_address_and_ends_with_what_was_decided(review_audit, started, capsys):
    assert main(["review", str(review_audit), "--no-browser", "--port", "0"]) == 0
    out, err = capsys.readouterr()
    assert "30 of 30 doubtful labels left to review" in out
    assert "Review at http://127.0.0.1:" in out
    assert "/?token=" in out
    assert "0 relabelled, 0 kept, 0 junk, 0 skipped; 30 left" in out
    assert f"Next: pseudoloss apply {review_audit} --out fixed.csv" in out
    assert err == ""
    assert len(started) == 1


def test_every_start_has_another_token(review_audit, started, capsys):
    tokens = []
    for _ in range(2):
        serve(review_audit, browser=False)
        tokens.append(capsys.readouterr().out.partition("token=")[2].split()[0])
    assert len(set(tokens)) == 2
    assert min(map(len, tokens)) >= 32


def test_it_opens_the_page(review_audit, started, monkeypatch):
    opened_review = []
    monkeypatch.setattr(server, "_has_display", lambda: True)
    monkeypatch.setattr(server.webbrowser, "open", opened_review.append)
    serve(review_audit)
    deadline = time.monotonic() + 30
    while not opened_review and time.monotonic() < deadline:
        time.sleep(0.01)
    assert opened_review[0].startswith("http://127.0.0.1:")


def test_another_host_warns(review_audit, started, capsys):
    assert (
        main(["review", str(review_audit), "--no-browser", "--host", "0.0.0.0", "--port", "0"]) == 0
    )
    assert "warning: --host 0.0.0.0: everyone who can reach this machine" in capsys.readouterr().err


def test_decisions_in_another_file(review_audit, started, tmp_path, capsys):
    file = tmp_path / "mine.jsonl"
    file.write_text("{damaged\n")
    arguments = ["review", str(review_audit), "--no-browser", "--decisions", str(file)]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert f"{file}: 1 damaged lines were ignored" in out
    assert f"--decisions {file} --out fixed.csv" in out
    assert not (review_audit / "decisions.jsonl").exists()


def test_wrong_input_is_one_line(review_audit, tmp_path, capsys, monkeypatch):
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    (tmp_path / "folder.jsonl").mkdir()
    for arguments, message in (
        (["--port", port], f"--port {port}: cannot be used"),
        (["--port", "70000"], "--port must be from 0 to 65535"),
        (["--port", "x"], "--port: must be a whole number"),
        (["--host", "no such host"], "--host no such host: no such address"),
        (["--decisions", str(tmp_path / "no" / "x.jsonl")], "there is no folder"),
        (["--decisions", str(tmp_path / "folder.jsonl")], "cannot be written"),
    ):
        assert main(["review", str(review_audit), "--no-browser", *arguments]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1
    taken.close()
    assert main(["review", str(tmp_path / "nothing")]) == 2
    assert "no such run" in capsys.readouterr().err
    monkeypatch.setattr(util, "find_spec", lambda name: None)
    monkeypatch.setattr("pseudoloss.cli.review.find_spec", lambda name: None)
    assert main(["review", str(review_audit)]) == 2
    err = capsys.readouterr().err
    assert "review needs fastapi and uvicorn: pip install -c constraints.txt '.[review]'" in err


def test_a_taken_default_port_is_replaced(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setattr(server, "PORT", taken.getsockname()[1])
        with listen("127.0.0.1", None) as listener:
            assert listener.getsockname()[1] != taken.getsockname()[1]
    with pytest.raises(InputError, match="--port must be"):
        listen("127.0.0.1", -1)


def test_older_runs_and_predictions(finished, started, capsys):
    """A training run has no examples.npz; arrays that were passed in Python have no images."""
    serve(finished, browser=False)
    assert "doubtful labels left" in capsys.readouterr().out


def test_two_servers_and_ctrl_c(review_audit, commands):
    first = commands.start("review", review_audit, "--no-browser", "--port", 0)
    wait_for_address(first)
    code, output = commands.run("review", review_audit, "--no-browser", "--port", 0)
    assert code == 2
    assert "decisions.jsonl: another pseudoloss review is using this file" in output
    os.kill(first.pid, signal.SIGINT)
    assert first.wait() == 0
    assert "Next: pseudoloss apply" in first.output
    assert lines_of(review_audit) == []
