"""What in a document is taken as a command."""

import pytest

from tests.integration import printed


def keys(text, read=printed.of_markdown):
    return [(command.key, command.line) for command in read(text, "x.md")]


def test_an_indented_block():
    text = "Do\n\n    pip list  # all\n    torchrun \\\n        a.py\n\n    Package  Version\n"
    assert keys(text) == [("pip list", 3), ("torchrun a.py", 4)]


def test_a_fence():
    text = "```sh\nfoo --bar\n# a comment\nfor x in 1 2; do\n    foo $x\ndone\n```\n"
    (first, second) = printed.of_markdown(text, "x.md")
    assert (first.text, first.line) == ("foo --bar", 2)
    assert (second.text, second.line) == ("for x in 1 2; do\n    foo $x\ndone", 4)


@pytest.mark.parametrize("language", ["python", "json", "yaml"])
def test_other_languages(language):
    assert keys(f"```{language}\npip list\n```\n") == []


def test_a_transcript():
    text = "    $ foo \\\n        'a\n    b'\n    pip says\n    $ bar; echo $?\n    3\n"
    first, second = printed.of_markdown(text, "x.md")
    assert (first.text, first.output, first.line) == ("foo \\\n    'a\nb'", "pip says", 1)
    assert (second.text, second.output, second.line) == ("bar; echo $?", "3", 5)


def test_help_as_text():
    text = "```text\nUsage: foo\n\n  Examples:\n      pip list \\\n          -v\n```\n"
    assert keys(text) == [("pip list -v", 5)]


def test_formulas_and_output_are_none():
    text = "    step = a + b\n\n    ddp-profiler: Global batch 2 is not 3.\n"
    assert keys(text) == []


@pytest.mark.parametrize(
    "text",
    [
        "    see\n    torchrun a.py\n",  # below what is no command
        "    pip list\n    Package  Version\n",  # output without a blank line
        "    pip list \\\n",  # goes on
        "```sh\nfor x in 1; do\n```\n",
    ],
)
def test_what_cannot_be_told_is_an_error_with_its_place(text):
    with pytest.raises(printed.NotUnderstood, match=r"x\.md: line \d"):
        printed.of_markdown(text, "x.md")


def test_a_list_and_a_table():
    text = "- Do\n\n      pip list\n\n| a |\n| --- |\n| x |\n| `pip freeze` |\n"
    assert keys(text) == [("pip list", 3), ("pip freeze", 8)]


def test_within_a_sentence():
    text = "One\ntwo `pip\nlist` and\n`A=1 pip freeze`.\n"
    assert [key for key, _ in keys(text)] == ["pip list", "A=1 pip freeze"]
    assert keys("One\ntwo\n`pip list`\n") == [("pip list", 3)]


@pytest.mark.parametrize(
    "text",
    [
        "ddp-profiler analyze",
        "ddp-profiler analyze RUN",
        "ddp-profiler merge DIR... --out x",
        "ddp-profiler trace FILE|FOLDER",
        "ddp-profiler predict --json",
        "python -m",
        "launch/lab",
        "mypy --strict",
        "ddp-profiler doctor RUN",
        "if __name__",
        "step / dp",
    ],
)
def test_names_and_patterns_are_no_commands(text):
    assert keys(f"Say `{text}`.\n") == []


@pytest.mark.parametrize("text", ["ddp-profiler doctor", "launch/lab --clean", "pip list"])
def test_whole_commands(text):
    assert len(keys(f"Say `{text}`.\n")) == 1


def test_the_head_of_a_launcher():
    text = (
        "#!/bin/sh\n# Here: pip x\n#   pip list   # all\n#   A=1 launch/x.sh\nset -e\n#   pip y\n"
    )
    assert keys(text, printed.of_launcher) == [("pip list", 3), ("A=1 launch/x.sh", 4)]


def test_files_to_save():
    saved = "Save this as `a.py`:\n\n```python\nx = 1\n```\n\nThen\n\n"
    text = f"{saved}```python\n# b/c.py\ny\n```\n\n```python\nz\n```\n"
    assert printed.files_of(text) == {"a.py": "x = 1\n", "b/c.py": "# b/c.py\ny\n"}
