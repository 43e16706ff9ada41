from recipes.common.pip_settings import parse_pip_config, uv_environment

CONFIG = r"""
:env:.find-links='/wheels'
global.cert='/etc/ca.pem'
global.extra-index-url='file:///a/simple\nfile:///b/simple'
global.find-links='/elsewhere'
global.index-url='https://one.example/simple'
global.timeout='60'
install.index-url='https://two.example/simple'
download.index-url='https://three.example/simple'
global.disable-pip-version-check='true'
""".splitlines()


def test_environment_wins_over_install_wins_over_global() -> None:
    settings = parse_pip_config(CONFIG)
    assert settings["find-links"] == "/wheels"
    assert settings["index-url"] == "https://two.example/simple"


def test_every_setting_reaches_uv_under_its_name() -> None:
    assert uv_environment(parse_pip_config(CONFIG), {}) == {
        "UV_FIND_LINKS": "/wheels",
        "UV_DEFAULT_INDEX": "https://two.example/simple",
        "UV_INDEX": "file:///a/simple file:///b/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_HTTP_TIMEOUT": "60",
        "SSL_CERT_FILE": "/etc/ca.pem",
    }


def test_what_the_user_told_uv_stays() -> None:
    found = uv_environment(parse_pip_config(CONFIG), {"UV_DEFAULT_INDEX": "mine", "SSL_CERT_FILE": "mine"})
    assert "UV_DEFAULT_INDEX" not in found and "SSL_CERT_FILE" not in found


def test_one_index_keeps_uvs_own_strategy_and_empty_settings_say_nothing() -> None:
    assert uv_environment(parse_pip_config(["global.index-url='https://one.example/simple'"]), {}) == {
        "UV_DEFAULT_INDEX": "https://one.example/simple"
    }
    assert uv_environment(parse_pip_config(["global.find-links=''"]), {}) == {}


def test_several_folders_are_separated_as_uv_wants_them() -> None:
    settings = parse_pip_config([r"global.find-links='/a\n/b'"])
    assert uv_environment(settings, {}) == {"UV_FIND_LINKS": "/a,/b"}
