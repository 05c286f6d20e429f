"""Settings: where they come from, which source wins, and that nothing wrong is taken silently."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefoot.api import settings
from surefoot.config import EngineConfig, ServerConfig
from surefoot.errors import ConfigError

FIELDS = {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__}


def test_every_field_has_a_setting_and_every_setting_a_field() -> None:
    """The table of settings and the two configurations name the same things."""
    assert set(settings.ENGINE) == set(EngineConfig.__struct_fields__)
    assert set(settings.SERVER) == set(ServerConfig.__struct_fields__)


def test_nothing_given_means_the_defaults() -> None:
    """Without flags, variables or a file the configurations are the default ones."""
    assert settings.resolve({"port": None, "api_key": []}, {"HOME": "/"}) == (EngineConfig(), ServerConfig())


def test_flag_beats_variable_beats_file_beats_default(tmp_path: Path) -> None:
    """Each source wins over the ones after it, setting by setting."""
    path = tmp_path / "serve.yaml"
    path.write_text("port: 1\nhost: file\nmax-num-seqs: 3\nmemory: 2GiB\n")
    environ = {"SUREFOOT_PORT": "2", "SUREFOOT_HOST": "variable"}
    engine, server = settings.resolve({"config": str(path), "port": "3"}, environ)
    assert (server.port, server.host, engine.max_num_seqs, engine.memory) == (3, "variable", 3, 2 << 30)
    assert engine.dtype == "auto"


def test_the_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    """SUREFOOT_CONFIG stands for --config."""
    path = tmp_path / "serve.yaml"
    path.write_text("api_key: [a, b]\nserved_model_name: one\nallow_fault_injection: true\n")
    engine, server = settings.resolve({}, {"SUREFOOT_CONFIG": str(path)})
    assert (server.api_key, server.served_model_name, engine.allow_fault_injection) == (("a", "b"), ("one",), True)


def test_lists_in_variables_have_commas() -> None:
    """SUREFOOT_API_KEY=a,b are two keys."""
    assert settings.resolve({}, {"SUREFOOT_API_KEY": "a, b"})[1].api_key == ("a", "b")


def test_log_level_goes_to_both() -> None:
    """One --log-level for the server and the worker."""
    engine, server = settings.resolve({"log_level": "debug"}, {})
    assert engine.log_level == server.log_level == "debug"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("port", "70000"), ("port", "eight"), ("dtype", "int4"), ("device", "tpu"), ("quantization", "int2"),
        ("load_format", "pickle"), ("max_model_len", "0"), ("max_model_len", "1 million"), ("memory", "lots"),
        ("max_num_seqs", "0"), ("block_size", "-1"), ("gpu_memory_utilization", "1.5"),
        ("gpu_memory_utilization", "nan"), ("seed", "-1"), ("drain_timeout", "-1"), ("drain_timeout", "inf"),
        ("log_level", "loud"), ("host", ""), ("model", ""), ("max_queued_requests", "0"),
    ],
)  # fmt: skip
def test_bad_values_name_their_source(name: str, text: str) -> None:
    """A value out of range is a ConfigError that names the flag, and the same for the variable."""
    with pytest.raises(ConfigError, match="^--" + name.replace("_", "-")):
        settings.resolve({name: text}, {})
    with pytest.raises(ConfigError, match="^SUREFOOT_" + name.upper()):
        settings.resolve({}, {"SUREFOOT_" + name.upper(): text})


def test_unknown_variables_are_refused_with_a_hint() -> None:
    """A mistyped variable does not become the default: the error names it and what may have been meant."""
    with pytest.raises(ConfigError, match=r"SUREFOOT_MAX_MODEL_LENGTH.*SUREFOOT_MAX_MODEL_LEN"):
        settings.resolve({}, {"SUREFOOT_MAX_MODEL_LENGTH": "4096"})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("prot: 8000", "no setting 'prot'.*port"),
        ("- port", "must hold settings"),
        ("port: {a: 1}", "plain value"),
        ("port: [1, 2]", "plain value"),
        ("a: b: c", "not YAML"),
        ("port: nine", "serve.yaml: port: 'nine'"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, content: str, message: str) -> None:
    """Whatever is wrong in the file, the error names the file and the key."""
    path = tmp_path / "serve.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        settings.resolve({"config": str(path)}, {})


def test_an_empty_file_is_fine_and_a_missing_one_is_not(tmp_path: Path) -> None:
    """Nothing in the file means the defaults; no file is an error that names it."""
    path = tmp_path / "serve.yaml"
    path.write_text("# nothing yet\n")
    assert settings.resolve({"config": str(path)}, {})[1] == ServerConfig()
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        settings.resolve({"config": str(tmp_path / "absent.yaml")}, {})


@pytest.mark.parametrize("options", [{"memory": "2GiB"}, {"memory": 2 << 30}, {"memory": "2GiB", "dtype": None}])
def test_offline_options_are_the_same_settings(options: dict[str, Any]) -> None:
    """LLM's keyword options are read as the flags are; plain numbers are taken too."""
    assert settings.engine_config(options).memory == 2 << 30


def test_unknown_offline_options_are_refused_with_a_hint() -> None:
    """A mistyped option of LLM is a ConfigError that names the close one; server settings are none."""
    with pytest.raises(ConfigError, match=r"max_model_length.*max_model_len\?"):
        settings.engine_config({"max_model_length": 4096})
    with pytest.raises(ConfigError, match="port"):
        settings.engine_config({"port": 8000})


def test_a_chat_template_is_a_text_or_a_file(tmp_path: Path) -> None:
    """Jinja is taken as it stands, a path is read, and what is neither is refused at start."""
    source = "{% for message in messages %}{{ message.content }}{% endfor %}"
    path = tmp_path / "template.jinja"
    path.write_text(source)
    for given in (source, str(path)):
        assert settings.resolve({"chat_template": given}, {})[1].chat_template == source
    with pytest.raises(ConfigError, match=r"--chat-template: \./nowhere is neither Jinja nor a file"):
        settings.resolve({"chat_template": "./nowhere"}, {})
