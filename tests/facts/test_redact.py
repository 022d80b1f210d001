"""Secrets are found by name, by place and by shape; what is none of these is left as it is."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.facts.redact import REDACTED, Redactor, holds_password, is_secret_name

NOTHING = Redactor({})


SECRET = (
    "HF_TOKEN GITHUB_TOKEN GITHUBTOKEN AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID OPENAI_API_KEY OPENAI_KEY WANDB_APIKEY "
    "PGPASSWORD MYSQL_PWD DB_PASSWD SMTP_PASS SSH_PRIVATE_KEY GOOGLE_CREDENTIALS REGISTRY_AUTH SLURM_JWT "
    "AZURE_CLIENT_SECRET azure_storage_sas_token MY_SECRET_VALUE"
)
HARMLESS = (
    "PATH PWD OLDPWD HOME TOKENIZERS_PARALLELISM MAX_TOKENS GIT_AUTHOR_NAME XAUTHORITY SSH_AUTH_SOCK MONKEY KEYBOARD "
    "AWS_WEB_IDENTITY_TOKEN_FILE TOKEN_URL PASSWORD_FILE AUTH_TYPE CUDA_VISIBLE_DEVICES PYTHONHASHSEED"
)


def test_names_of_secrets() -> None:
    assert [name for name in SECRET.split() if not is_secret_name(name)] == []
    assert [name for name in HARMLESS.split() if is_secret_name(name)] == []


PEM = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow" + "IBAAKCAQEA7" * 8 + "\nQ2FuYXJ5" + "xYz0" * 15
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        # By shape.
        ("a hf_AbCdEfGhIjKlMnOpQrStUvWxYz012345 b", "a [redacted] b"),
        ("ghp_0123456789abcdefghijABCDEFGHIJ012345", "[redacted]"),
        ("key sk-proj-AbCdEfGh0123456789IjKlMn.", "key [redacted]."),
        ("AKIAIOSFODNN7EXAMPLE", "[redacted]"),
        (f"jwt {JWT} end", "jwt [redacted] end"),
        (f"x\n{PEM}\n-----END RSA PRIVATE KEY-----\ny", "x\n[redacted]\ny"),
        (repr(f"{PEM}\n-----END RSA PRIVATE KEY-----\n"), "'[redacted]\\n'"),
        # Cut off before its end.
        (f"{PEM}\nstep 5", "[redacted]\nstep 5"),
        # By place.
        ("https://user:p4ss@host:80/a?b=1", "https://[redacted]@host:80/a?b=1"),
        ("postgres://u:p@ss/w:rd@host/db", "postgres://[redacted]@host/db"),
        ("redis://:p4ss@host", "redis://[redacted]@host"),
        ('{"a": "s3://k:secret@b", "c": 1}', '{"a": "s3://[redacted]@b", "c": 1}'),
        ("https://b/o?X-Amz-Signature=12ab&partNumber=1", "https://b/o?X-Amz-Signature=[redacted]&partNumber=1"),
        ("https://b/o?sv=2020&sig=a%2Fb%3D", "https://b/o?sv=2020&sig=[redacted]"),
        ("Authorization: Bearer abcdefghij", "Authorization: Bearer [redacted]"),
        ("{'authorization': 'Basic dXNlcjpwYXNz'}", "{'authorization': 'Basic [redacted]'}"),
        ("HF_TOKEN=abcdef12 HOME=/root", "HF_TOKEN=[redacted] HOME=/root"),
        ("{'MY_API_KEY': 'abc-defg', 'A': 'b'}", "{'MY_API_KEY': '[redacted]', 'A': 'b'}"),
        ('{"password": "hunter2"}', '{"password": "[redacted]"}'),
        ("login failed: password=hunter2, retry", "login failed: password=[redacted], retry"),
        ("client_secret: aB3-x_99", "client_secret: [redacted]"),
    ],
)  # fmt: skip
def test_secrets_without_a_name(text: str, clean: str) -> None:
    assert NOTHING.text(text) == clean
    assert NOTHING.text(clean) == clean


@pytest.mark.parametrize(
    "text",
    [
        "step    120/2000  loss 3.1416  12.5k tokens/s  memory 1,024 MiB  ETA 3m 05s",
        "loss_hex 0x1.921fb54442d18p+1, hash " + "0123456789abcdef" * 4,
        "commit 118a26c0ffee118a26c0ffee118a26c0ffee1234",
        "/home/user/runs/sk-learn-experiments-with-a-long-name-2024/checkpoints/step-00000100/rank-00003-ab12.bin",
        "end_token = '<|endoftext|>', tokens=4096, token: 1234567890, eos_token_id=128001",
        "s3://bucket/runs/name and file:///a/b@c, ssh://git@host/x, http://host:8080/a@v1, http://[::1]:80/x@y",
        "git+https://github.com:443/pytorch/pytorch@main",
        "rank 1 stalled: in step 6, it has not joined all_gather #52 of group fsdp (ranks 0,1) at execute.py:185",
        "    client = Client(api_key=os.environ['API_KEY'], password=password, secret_key=self.secret_key)",
        "API_KEY = read(path); PASSWORD: str; TOKEN = None; AUTH = args.auth_name",
        "layout fsdp=4,tp=2 recompute=selective offload=optimizer:0.5@nvme",
        "2x8xA100-80GB, key: ValueError, group=dp; model.layers.0.self_attn.k_proj.weight",
        "?q=1&page=2&signed=false",
        "the secret is to begin; a password is needed; author: someone-else-1",
        "AKIA and hf_hub_download_with_progress and sk-short and eyJ.eyJ",
        "Authorization: none",
    ],
)
def test_normal_output_stays(text: str) -> None:
    assert NOTHING.text(text) == text


def test_values_of_the_environment_are_known_wherever_they_are() -> None:
    redactor = Redactor(
        {
            "MY_API_KEY": "plain-Value/9",
            "WANDB_API_KEY": "0123456789abcdef" * 2,
            "DATABASE_URL": "postgres://user:in_URL_77@db/x",
            "DEPLOY_KEY": f"{PEM}\n-----END RSA PRIVATE KEY-----\n",
            "HOME": "/home/plain-home",
        }
    )
    for text in (
        "plain-Value/9",
        "(plain-Value/9)",
        "plain-Value%2F9",
        "x" + "0123456789abcdef" * 2 + "x",
        "in_URL_77",
        PEM.splitlines()[-1],
    ):
        clean = redactor.text(f"before {text} after")
        assert REDACTED in clean and text.strip("x()") not in clean, text
        assert clean.startswith("before ") and clean.endswith(" after")
    stays = "plain-Value/95 /home/plain-home 0123456789abcdef user db"
    assert redactor.text(stays) == stays


def test_words_numbers_and_paths_are_no_secrets_whatever_their_name(tmp_path: Path) -> None:
    values = {
        "A_TOKEN": "true", "B_TOKEN": "12345678", "C_PASSWORD": "postgres", "D_AUTH": "default",
        "GOOGLE_APPLICATION_CREDENTIALS": str(tmp_path), "E_SECRET": "", "F_SECRET": "   ",
    }  # fmt: skip
    text = " ".join(values.values()) + " 12345678 postgres"
    assert Redactor(values).text(text) == text


def test_quotation_marks_inside_of_a_secret() -> None:
    for value in ('abc12"tail', "back\\slash1", "it's-1234", 'https://u:a"b\\c@h/x'):
        text = NOTHING.text(json.dumps({"password": value}))
        assert (
            json.loads(text) in ({"password": REDACTED}, {"password": f"https://{REDACTED}@h/x"})
            or "'" in value
        )
        assert "tail" not in text and "slash" not in text and "b\\" not in text


def test_only_texts_are_redacted_in_structures() -> None:
    redactor = Redactor({"MY_TOKEN": "1234567890123456"})
    before = {
        "a": ["x 1234567890123456", 1234567890123456, None, True, 1.5],
        "1234567890123456": ("https://u:p@h",),
        "step": 3,
    }
    assert redactor.values(before) == {
        "a": ["x [redacted]", 1234567890123456, None, True, 1.5],
        "[redacted]": ("https://[redacted]@h",),
        "step": 3,
    }


@given(st.recursive(st.text() | st.integers(), lambda inner: st.dictionaries(st.text(), inner), max_leaves=5))
@example({"SECRET": -10000})
@example({"SECRET": 1234567890123456789})
@example({"HF_TOKEN": "1234567890123456789"})
def test_json_stays_json_and_twice_is_once(document: object) -> None:
    text = json.dumps(document)
    clean = NOTHING.text(text)
    json.loads(clean)
    assert NOTHING.text(clean) == clean


@pytest.mark.parametrize(
    "text",
    ["://a:" * 20_000, "A" * 200_000, "a=b&" * 50_000, "-----BEGIN PRIVATE KEY-----\n" * 300, "://" + "a:" * 50_000,
     "eyJaaaaaaaaaa." * 10_000, "password=" * 20_000, "sk-a" * 40_000, "authorization:" + " " * 50_000],
)  # fmt: skip
def test_no_text_takes_long(text: str) -> None:
    start = time.process_time()
    NOTHING.text(text)
    assert time.process_time() - start < 3


def test_urls_that_bring_their_own_credentials() -> None:
    for url in (
        "https://u:p@h/x",
        "s3://k:a/b@bucket",
        "https://h/x?sig=abc",
        "https://h/x?a=1&X-Amz-Signature=f",
    ):
        assert holds_password(url), url
    for url in ("https://h:80/x", "s3://bucket/x", "/a/b:c@d", "ssh://git@h", "https://h/x?a=1", "u:p@h"):
        assert not holds_password(url), url
