"""What never gets into a capture, and what must not be taken out by mistake."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firetower.capture import ModelInfo, freeze_request
from firetower.capture.environment import collect_environment
from firetower.capture.secrets import ALLOWED_HEADERS, allowed_headers, is_secret_name, scrub

SECRET = "very-secret-value-1234567890"


@pytest.mark.parametrize(
    "header",
    ["Authorization", "Cookie", "Set-Cookie", "X-API-Key", "api-key", "Proxy-Authorization", "X-Amz-Security-Token",
     "OpenAI-Organization", "X-Forwarded-For", "X-Anything-Else"],
)  # fmt: skip
def test_headers_not_on_the_list_are_dropped_and_marked(header):
    kept, dropped = allowed_headers({header: SECRET, "Content-Type": "application/json"})
    assert kept == {"content-type": "application/json"}
    assert dropped == (f"header {header.lower()}",)


def test_a_key_in_an_allowed_header_is_dropped_too():
    kept, dropped = allowed_headers({"User-Agent": "me Bearer abcdefgh12345678", "Accept": "*/*"})
    assert kept == {"accept": "*/*"}
    assert dropped == ("header user-agent",)
    assert all(name == name.lower() for name in ALLOWED_HEADERS)


@pytest.mark.parametrize(
    "name",
    ["api_key", "API-Key", "apikey", "openai_api_key", "x-api-key", "authorization", "password", "db_password", "token",
     "access_token", "hf_token", "client_secret", "aws_secret_access_key", "cookie", "session_token", "private_key"],
)  # fmt: skip
def test_secret_fields_are_known_however_spelt(name):
    assert is_secret_name(name)
    for body in ({name: SECRET}, {"extra_body": {name: SECRET}}, {"l": [{name: SECRET}]}, {name: {"v": SECRET}}):
        clean = scrub(body, "body")
        assert SECRET not in json.dumps(clean.value)
        assert len(clean.dropped) == 1
        assert clean.dropped[0].startswith("body.")


@pytest.mark.parametrize(
    "name",
    ["max_tokens", "token_ids", "stop_token_ids", "prompt_token_ids", "tokens", "min_tokens", "tokenizer", "key",
     "add_special_tokens", "skip_special_tokens", "logit_bias", "author", "secretary", "cookies_recipe"],
)  # fmt: skip
def test_harmless_fields_stay(name):
    body = {name: 5, "x": {name: "value"}}
    assert scrub(body).value == body


def test_a_switch_or_a_tool_parameter_called_so_is_no_secret():
    tool = {
        "type": "function",
        "function": {
            "name": "login",
            "parameters": {"type": "object", "properties": {"password": {"type": "string", "description": "pw"}}},
        },
    }
    body = {"tools": [tool], "use_auth": True, "token": None, "auth": False}
    clean = scrub(body)
    assert clean.value == body
    assert clean.dropped == ()


def test_headers_inside_a_tool_go_by_the_list():
    body = {"tools": [{"type": "mcp", "headers": {"X-Mine": SECRET, "Accept": "*/*"}, "authorization": SECRET}]}
    clean = scrub(body, "body")
    assert clean.value == {"tools": [{"type": "mcp", "headers": {"accept": "*/*"}}]}
    assert clean.dropped == ("body.tools[0].headers: header x-mine", "body.tools[0].authorization")


def test_a_tool_parameter_called_headers_is_a_schema():
    body = {"tools": [{"function": {"parameters": {"properties": {"headers": {"type": "object"}}}}}]}
    assert scrub(body).value == body
    mixed = scrub({"headers": {"X-Mine": SECRET, "retries": 3}})
    assert mixed.value == {"headers": {}}


@pytest.mark.parametrize(
    "value",
    ["sk-proj-abcdefghijklmnop1234", "hf_abcdefghijklmnopqrst", "ghp_abcdefghijklmnopqrstuvwx", "AKIAABCDEFGHIJKLMNOP",
     "Bearer abc.def-ghi", "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", "-----BEGIN RSA PRIVATE KEY-----"],
)  # fmt: skip
def test_values_that_look_like_keys_are_dropped_under_any_name(value):
    clean = scrub({"metadata": {"note": value}, "stop": ["ok", value]}, "body")
    assert clean.value == {"metadata": {}, "stop": ["ok"]}
    assert len(clean.dropped) == 2


def test_what_was_typed_into_the_prompt_stays_word_for_word():
    typed = "my password: hunter2, key sk-proj-abcdefghijklmnop1234"
    body = {
        "messages": [
            {"role": "user", "content": typed},
            {"role": "user", "content": [{"type": "text", "text": typed}]},
        ],
        "prompt": [typed],
    }
    clean = scrub(body)
    assert clean.value == body
    assert clean.dropped == ()


def test_credentials_leave_urls_and_the_rest_of_the_url_stays():
    url = "https://user:pw@host.example/a/b.png?size=3&X-Amz-Signature=abc&token=t#x"
    clean = scrub({"image_url": {"url": url}}, "body")
    assert clean.value == {"image_url": {"url": "https://host.example/a/b.png?size=3#x"}}
    assert clean.dropped == ("body.image_url.url (credentials in a URL)",)
    plain = {"url": "https://host.example/a?size=3&q=a+b"}
    assert scrub(plain).value == plain


def test_keys_on_a_recorded_command_line_are_dropped():
    argv = ["serve", "--api-key", SECRET, "--port", "80", f"--api-key={SECRET}", "--max-tokens", "5"]
    clean = scrub({"argv": argv}, "settings")
    assert clean.value == {"argv": ["serve", "--api-key", "--port", "80", "--max-tokens", "5"]}
    assert clean.dropped == ("settings.argv[2]", "settings.argv[5]")


def test_what_is_nested_too_deep_to_look_through_is_dropped():
    deep = {"api_key": SECRET}
    for _ in range(500):
        deep = {"x": deep}
    clean = scrub(deep)
    assert SECRET not in str(clean.value)
    assert "nested too deep" in clean.dropped[0]


_NAMES = st.sampled_from(
    ["a", "messages", "api_key", "Api-Key", "tools", "headers", "x_secret", "password", "properties"]
)
_BODY = st.recursive(
    st.just(SECRET) | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=4),
    max_leaves=15,
)


@given(st.dictionaries(_NAMES, _BODY, max_size=5))
@settings(max_examples=120, deadline=None)
def test_scrubbing_twice_changes_nothing_more(body):
    once = scrub(body)
    again = scrub(once.value)
    assert again.value == once.value
    assert again.dropped == ()


def test_a_frozen_request_has_no_secret_anywhere():
    capture = freeze_request(
        {"model": "m", "messages": [], "api_key": SECRET, "extra": {"password": SECRET}},
        path=f"https://user:{SECRET}@host/v1/chat/completions?api_key={SECRET}",
        headers={"Authorization": f"Bearer {SECRET}", "Cookie": SECRET},
        engine_settings={"hf_token": SECRET, "argv": ["--api-key", SECRET]},
        model=ModelInfo(name="m"),
    )
    assert SECRET not in repr(capture)
    assert capture.request.path == "/v1/chat/completions"
    assert set(capture.request.dropped) == {
        "header authorization", "header cookie", "body.api_key", "body.extra.password",
    }  # fmt: skip
    assert len(capture.left_out) == 2


def test_the_environment_is_taken_by_an_allow_list():
    environ = {"OPENAI_API_KEY": SECRET, "HF_TOKEN": SECRET, "CUDA_VISIBLE_DEVICES": "0", "PATH": "/x"}
    env = collect_environment("some device", environ)
    assert env.variables == {"CUDA_VISIBLE_DEVICES": "0"}
    assert env.device == "some device"
    assert env.versions["numpy"]
    assert SECRET not in repr(env)
    assert collect_environment(None, {"CUDA_VISIBLE_DEVICES": "sk-abcdefghijklmnopqrst"}).variables == {}
