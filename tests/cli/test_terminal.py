"""On a terminal the command line fits its width and has colours; in a pipe it is plain lines."""

from __future__ import annotations

import os
import re

import pytest

from accel_testing.commands import ACCEL, clean_environment
from accel_testing.patience import patience

pty = pytest.importorskip("pty", exc_type=ImportError)
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


def on_a_terminal(start_command, *words, environment=None, cwd=None, answers=""):
    """What `accel` writes to a terminal of 80 columns."""
    import fcntl
    import struct
    import termios

    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
    variables = {**clean_environment(environment), "TERM": "xterm-256color"}
    for name in ("NO_COLOR", "COLUMNS", "FORCE_COLOR"):
        if name not in (environment or {}):
            variables.pop(name, None)
    process = start_command([ACCEL, *words], stdin=its, stdout=its, stderr=its, env=variables, cwd=cwd)
    os.close(its)
    os.write(ours, answers.encode())
    output = b""
    try:
        while piece := os.read(ours, 65536):
            output += piece
    except OSError:  # Linux: the other side is closed
        pass
    os.close(ours)
    assert process.wait(patience(60)) == 0, output.decode()
    return output.decode().replace("\r\n", "\n")


def plain(text):
    return ESCAPE.sub("", text)


@pytest.mark.parametrize(
    "words",
    [
        ("plugins",),
        ("plugins", "--why"),
        ("plugins", "doctor", "pony"),
        ("config", "show"),
        ("launch", "--dry-run", "-n", "2", "--launch.rendezvous", "127.0.0.1:29500", __file__),
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_everything_fits_into_80_columns(toys, words, start_command):
    environment = toys("pony", "strategy", summary=repr("A plugin that takes " + "many words " * 12))

    shown = plain(on_a_terminal(start_command, *words, environment=environment))

    assert [line for line in shown.splitlines() if len(line.rstrip()) > 80] == []


def test_the_columns_of_a_listing_stand_in_one_line_and_the_long_one_below(toys, start_command):
    environment = toys("pony", "strategy", summary=repr("A plugin that takes " + "many words " * 12))

    lines = plain(on_a_terminal(start_command, "plugins", environment=environment)).splitlines()

    place = next(number for number, line in enumerate(lines) if line.startswith("pony"))
    assert lines[place].split() == ["pony", "strategy", "available", "accel-pony", "1.0"]
    assert lines[place + 1].startswith("    A plugin that takes many words")
    assert lines[place + 2].startswith("    ")


def test_a_short_last_column_stays_beside_the_others(start_command):
    lines = plain(on_a_terminal(start_command, "config", "show")).splitlines()

    assert ["device", '"auto"', "default"] in [line.split() for line in lines]


def test_a_status_has_its_colour_on_a_terminal_only(toys, accel, start_command):
    environment = toys("pony", "strategy", source="raise OSError('no such library')")

    assert "\x1b[31mbroken\x1b[0m" in on_a_terminal(start_command, "plugins", environment=environment)
    assert "\x1b" not in accel("plugins", environment=environment).stdout


def test_answers_are_asked_for_again_until_they_are_right(tmp_path, start_command):
    answers = "\n\n\nmany\n3\n\n1\n\n\n\n"

    shown = plain(on_a_terminal(start_command, "config", "init", cwd=tmp_path, answers=answers))

    assert "gradient_accumulation_steps [1]: " in shown
    assert "Error: " in shown
    assert "gradient_accumulation_steps: 3" in (tmp_path / "accel.yaml").read_text()


def test_long_words_are_folded_and_not_cut(toys, tmp_path, start_command):
    folder = "a-folder-" + "of-many-words-" * 12
    (tmp_path / "accel.yaml").write_text(f"project: {{project_dir: {folder}}}\n")
    shown = plain(on_a_terminal(start_command, "config", "show", cwd=tmp_path))
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown
    assert folder in re.sub(r"\s", "", shown)


def test_a_terminal_without_columns_shows_everything_all_the_same(toys, start_command):
    shown = plain(
        on_a_terminal(start_command, "plugins", environment=toys("pony", "strategy") | {"COLUMNS": "0"})
    )
    assert "pony" in re.sub(r"\s", "", shown)


def test_a_closed_stdout_is_no_terminal(tmp_path, run_command):
    ended = run_command(
        ["sh", "-c", '"$0" config show >&-', ACCEL],
        env=clean_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in ended.stderr
