import pytest

from rollout_io.cli.main import run


def test_the_verb_says_what_is_missing_or_wrong(capsys, tmp_path):
    assert run(["record", "--out", str(tmp_path)]) == 2
    assert "--upstream" in capsys.readouterr().err
    given = ["--upstream", "http://127.0.0.1:9", "--out", str(tmp_path / "f")]
    (tmp_path / "f").write_text("")
    assert run(["record", *given]) == 1
    assert "output_file" in capsys.readouterr().err
    assert run(["record", "--upstream", "http://127.0.0.1:9", "--out", "memory://ds"]) == 1
    assert "needs a local directory" in capsys.readouterr().err
    assert run(["record", "--upstream", "127.0.0.1:9", "--out", str(tmp_path / "ds")]) == 1
    assert (
        "found '127.0.0.1:9'; expected a URL such as http://HOST:PORT/v1" in capsys.readouterr().err
    )


@pytest.mark.parametrize("host", ["256.0.0.1", "192.0.2.1"])
def test_an_address_that_cannot_be_listened_on_is_an_error(capsys, tmp_path, host):
    given = ["--upstream", "http://127.0.0.1:9", "--out", str(tmp_path / "ds"), "--host", host]
    assert run(["record", *given]) == 1
    said = capsys.readouterr().err
    assert f"{host}:8100" in said
    assert "--admin-key" in said
