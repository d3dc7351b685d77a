"""`kvtier config`, in processes of its own as people call it."""

import json
import os
from pathlib import Path

import pytest

from certificates import Authority
from config_command_rig import SECRETS, findings, run
from kvtier.cli.configuration.command import findings as findings_of
from kvtier.cli.configuration.command import markdown_page
from kvtier.config.reference import keys
from kvtier_engine.demo.demo_model import demo_model_path

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
ENGINE = "tenant = 'a'\n[tenants.a]\nsecret = 'env:KVTIER_SECRET'\ntoken = 'env:KVTIER_TOKEN'\n"
KEYS = f"[api_keys.alice]\ntenant = 'a'\nkey_sha256 = ['{'cd' * 32}']\n[tenants.a]\n"
GATEWAY = f"[gateway]\nengines = ['http://127.0.0.1:8000']\n{KEYS}"
POOL = f"[tenants.a]\ntoken_sha256 = ['{'ab' * 32}']\n[pool_service]\n"


@pytest.mark.parametrize("field", ["tls_certificate", "tls_key", "tls_client_ca"])
def test_files_for_tls_of_a_pool_that_are_not_all_there(field: str, tmp_path: Path) -> None:
    """All findings are told, and not the first one alone."""
    file = tmp_path / "pool.toml"
    file.write_text(f"{POOL}{field} = 'file.pem'\nredis_password = 'env:NO_SUCH_VARIABLE'\n")
    code, found = findings(file)
    assert code == 1
    told = "\n".join(finding["text"] for finding in found)
    assert "certificate and " in told
    assert "redis_password" in told


@pytest.mark.parametrize("role", ["engine", "pool", "gateway"])
def test_a_file_to_begin_with_can_be_used(role: str, tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    assert run("init", role, "--output", str(file)).returncode == 0
    assert file.stat().st_mode & 0o777 == 0o600
    code, found = findings(file, **SECRETS)
    assert code == 0, found
    again = run("init", role, "--output", str(file))
    assert (again.returncode, "File exists" in again.stderr) == (1, True)


def test_a_commented_line_of_a_file_to_begin_with_can_be_taken_in(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    for role in ("engine", "pool", "gateway"):
        text = run("init", role).stdout
        lines = [line.removeprefix("# ") for line in text.splitlines()]
        wanted = {line.split(" = ")[0]: line for line in lines if line.startswith("[") or " = " in line}
        file.write_text("\n".join(wanted.values()))
        _, found = findings(file, **SECRETS, KVTIER_REDIS_PASSWORD="x", KVTIER_OPERATOR_SHA256="cd" * 32)
        wrong = [finding["text"] for finding in found if "unknown key" in finding["text"] or "TOML" in finding["text"]]
        assert wrong == []


@pytest.mark.parametrize(
    ("text", "severity", "parts"),
    [
        ("[pool]\nadress = 'x:1'", "error", ["pool.adress", "did you mean 'address'"]),
        ("tenant = 'a'\n[tenants.a]\nsecret = 'env:NOPE'", "error", ["tenants.a.secret", "NOPE is missing"]),
        (f"{ENGINE}[disk]\nsync = 'batch'", "warning", ["disk.sync", "disk.directory"]),
        (ENGINE, "warning", ["pool.address", "nothing is shared"]),
        (f"{ENGINE}[host]\ncapacity_bytes = '1000TiB'", "error", ["host.capacity_bytes", "lower it"]),
        (f"{ENGINE}[pool]\naddress = 'pool.site:7600'", "error", ["pool.address", "pool.site:7600 in the clear"]),
        (f"{ENGINE}[pool]\ninsecure = true\naddress = 'pool.site:7600'", "warning", ["pool.insecure", "in the clear"]),
        (
            f"{ENGINE}[engine]\nnum_threads = 1024",
            "warning",
            ["engine.num_threads", "1024 threads wait for each other"],
        ),
        (
            f"gateway_tenants = ['a']\n{ENGINE}[engine]\nlisten = '0.0.0.0:8000'",
            "warning",
            ["gateway_tenants", "whoever reaches 0.0.0.0:8000", "Let only the gateway reach it"],
        ),
        (f"{ENGINE}[engine]\nmodel = 'nowhere'", "error", ["engine.model", "is not there"]),
        (f"{POOL}listen = ['0.0.0.0:7600']", "error", ["pool_service.listen", "insecure"]),
        (
            f"{POOL}listen = []\ngrpc_listen = []",
            "error",
            ["pool_service.listen", "no address, and none in pool_service.grpc_listen", "give one of them an address"],
        ),
        (f"{POOL}memory_bytes = '1000TiB'", "warning", ["pool_service.memory_bytes"]),
        (
            f"{POOL}redis_url = 'redis://x'\nredis_lookup_timeout_s = 3\nredis_timeout_s = 4",
            "warning",
            ["pool_service.redis_lookup_timeout_s", "engines wait 1 s", "make it shorter"],
        ),
        (f"{POOL}redis_ttl_s = 5", "warning", ["pool_service.redis_ttl_s", "redis_url"]),
        (f"{POOL}disk_dir = 'd'\ndisk_bytes = '900TiB'", "warning", ["pool_service.disk_bytes", "never be had"]),
        (
            f"{POOL}disk_dir = 'd'\ndisk_reserve_bytes = '900TiB'",
            "warning",
            ["pool_service.disk_reserve_bytes", "nothing will be stored"],
        ),
        (
            f"{POOL}memory_bytes = '2MiB'\n[tenants.a.memory]\nguaranteed_bytes = '4MiB'",
            "error",
            ["guaranteed_bytes", "guarantee less"],
        ),
        (
            f"{POOL}[tenants.a.memory]\ncap_bytes = 1",
            "warning",
            ["tenants.a.memory.cap_bytes", "1 B hold no block of most models", "raise it or leave it out"],
        ),
        ("[pool_service]\nmemory_bytes = '2MiB'", "error", ["no token_sha256 anywhere"]),
        (
            f"{POOL}listen = 'unix:pool.sock'\nsocket_group = 'nogroupx'",
            "error",
            ["pool_service.socket_group", "'nogroupx': there is no such group; make it"],
        ),
        (
            f"{POOL}grpc_listen = 'unix:/nope/pool.sock'",
            "error",
            ["pool_service.grpc_listen", "no folder /nope; make one"],
        ),
        (f"{POOL}audit_log = '/nope/audit.log'", "error", ["pool_service.audit_log", "there is no folder /nope"]),
        (f"{POOL}record_trace = '/nope/t'", "error", ["pool_service.record_trace", "there is no folder /nope"]),
        (f"{ENGINE}[cache]\nrecord_trace = '/nope/t'", "error", ["cache.record_trace", "there is no folder /nope"]),
        (
            f"{POOL}listen = '127.0.0.1:9999'\nhttp_listen = ':9999'",
            "error",
            ["pool_service.http_listen", "pool_service.listen = 127.0.0.1:9999", "a port of its own"],
        ),
        (f"{POOL}listen = ['[::1]:9999', '[::1]:9999']", "error", ["pool_service.listen", "is there twice"]),
        (f"{POOL}redis_url = 'http://x'", "error", ["pool_service.redis_url", "begins with 'http'"]),
        (
            f"{POOL}redis_url = 'redis://x'\nredis_admission = 'tenant-share:0.5'",
            "error",
            ["pool_service.redis_admission", "leave it out"],
        ),
        (
            f"{POOL}redis_url = 'redis://:pw@x'",
            "error",
            ["pool_service.redis_url", "redis_username and redis_password"],
        ),
        (f"{POOL}tls_certificate = 'nope.pem'\ntls_key = 'nope.key'", "error", ["nope"]),
        (
            GATEWAY.replace("[gateway]", "[gateway]\nlisten = '127.0.0.1:9999'\nstatus_listen = 'localhost:9999'"),
            "error",
            ["gateway.status_listen", "gateway.listen = 127.0.0.1:9999"],
        ),
        (
            GATEWAY.replace("[gateway]", "[gateway]\ntokenizer = 'nope'"),
            "error",
            ["gateway.tokenizer", "tokenizer.json"],
        ),
        (
            GATEWAY.replace("[gateway]", "[gateway]\nengine_token = 'env:NOPE'"),
            "error",
            ["gateway.engine_token", "NOPE"],
        ),
        (f"{POOL}[tenants.b]\nsecret = 'env:NOPE'", "warning", ["tenants.b.secret", "is for engines alone"]),
        (
            f"{ENGINE.replace('KVTIER_TOKEN', 'KVTIER_SECRET')}[pool]\naddress = '127.0.0.1:7600'",
            "error",
            ["tenants.a.token", "the same as the tenant's secret"],
        ),
        (
            GATEWAY.replace("[gateway]", "[gateway]\npass_parameters = ['lora_path', 'x']"),
            "error",
            ["gateway.pass_parameters", "lora_path: clients may not set", "leave it out"],
        ),
        (
            GATEWAY.replace(f"'{'cd' * 32}'", f"{{sha256 = '{'cd' * 32}', expires_at = 2020-01-01T00:00:00Z}}"),
            "warning",
            ["api_keys.", "none holds any more, since 2020-01-01 00:00 UTC", "add a newer one"],
        ),
        (
            POOL.replace(f"'{'ab' * 32}'", f"{{sha256 = '{'ab' * 32}', expires_at = 2020-01-01T00:00:00Z}}"),
            "warning",
            ["tenants.a.token_sha256", "none holds any more"],
        ),
        (f"{GATEWAY}secret = 'env:NOPE'", "error", ["tenants.a.secret", "NOPE is missing"]),
        ("", "warning", ["no key is set"]),
    ],
)
def test_what_is_wrong_is_found_before_anything_starts(
    text: str, severity: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("KVTIER__")]:
        monkeypatch.delenv(name)
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    file = tmp_path / "kvtier.toml"
    file.write_text(text)
    found = findings_of(file)
    said = [f"{finding.key}: {finding.text}" for finding in found if finding.severity == severity]
    assert any(all(part in line for part in parts) for line in said), found
    assert severity == "error" or not any(finding.severity == "error" for finding in found), found


def test_sizes_are_told_in_tokens_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    shape = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}
    (model / "config.json").write_text(json.dumps(shape))
    file = file_of_model(model, tmp_path, monkeypatch)
    texts = [finding.text for finding in findings_of(file) if finding.key == "engine.kv_bytes"]
    assert any("2,912 tokens" in text for text in texts), texts
    block = 23_040 * 16
    for key, least in (("engine.kv_bytes", block), ("host.capacity_bytes", block * 16)):
        for nbytes, is_error in ((1, True), (least - 1, True), (least, False)):
            monkeypatch.setenv(f"KVTIER__{key.upper().replace('.', '__')}", str(nbytes))
            errors = [each.text for each in findings_of(file) if (each.severity, each.key) == ("error", key)]
            assert [f"set it to {least:,} at the very least" in text for text in errors] == [True] * is_error


def test_without_a_cache_nothing_is_said_of_its_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER__ENGINE__CACHE", "false")
    file = file_of_model(demo_model_path(), tmp_path, monkeypatch)
    assert {finding.key for finding in findings_of(file)} == {"engine.kv_bytes"}
    monkeypatch.setenv("KVTIER__DISK__DIRECTORY", str(tmp_path))
    assert {finding.key for finding in findings_of(file)} == {"engine.kv_bytes", "engine.cache"}


def test_sizes_are_told_of_a_gguf_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo's model has the shape of the test above."""
    file = file_of_model(demo_model_path(), tmp_path, monkeypatch)
    monkeypatch.setenv("KVTIER__HOST__CAPACITY_BYTES", "1")
    found = {finding.key: finding.text for finding in findings_of(file) if finding.severity == "error"}
    assert "set it to 5,898,240 at the very least" in found["host.capacity_bytes"]


def file_of_model(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = folder / "kvtier.toml"
    file.write_text(
        f"tenant = 'a'\n[tenants.a]\nsecret = 'env:KVTIER_SECRET'\n[engine]\nmodel = '{model}'\nkv_bytes = '64MiB'"
    )
    monkeypatch.setenv("KVTIER_SECRET", SECRETS["KVTIER_SECRET"])
    return file


def test_api_keys_are_those_of_the_process_that_the_file_is_for(tmp_path: Path) -> None:
    """A gateway needs no secret of a tenant, and an engine no other engines."""
    file = tmp_path / "kvtier.toml"
    engine = f"{KEYS}secret = 'env:KVTIER_SECRET'\n[disk]\ndirectory = 'blocks'\nreserve_bytes = 0\n"
    for text in (GATEWAY, engine):
        file.write_text(text)
        _, found = findings(file, **SECRETS)
        assert [each for each in found if each["severity"] != "note"] == []
    file.write_text(KEYS)
    _, found = findings(file, **SECRETS)
    assert "tenants.a.secret: missing" in found[0]["text"]


@pytest.mark.parametrize(
    ("table", "text"),
    [("[engine]", ENGINE), ("[pool_service]", POOL), ("[gateway]", GATEWAY)],
    ids=lambda text: text[:9],
)
def test_a_certificate_that_does_not_hold_is_told_before_anything_starts(table: str, text: str, tmp_path: Path) -> None:
    authority, file = Authority(tmp_path), tmp_path / "kvtier.toml"
    files = f"{table}\ntls_certificate = 'it.pem'\ntls_key = 'it.key'\n"
    file.write_text(text.replace(f"{table}\n", files) if table in text else text + files)
    for days, begin, said in (
        (-1, -2, " expired at "), (3, -2, " expires at "), (900, -2, None), (900, 1, "on, and no TLS connection"),
    ):  # fmt: skip
        authority.issue("it", "127.0.0.1", valid_days=days, from_days=begin)
        _, found = findings(file, **SECRETS)
        texts = [each["text"] for each in found if each["key"].endswith(".tls_certificate")]
        assert len(texts) == (said is not None)
        assert all(said in text for text in texts if said)


def test_what_starts_and_cannot_do_what_is_set(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    assert run("init", "engine", "--output", str(file)).returncode == 0
    file.write_text(file.read_text().replace("[host]", "[host]\ncapacity_bytes = 1"))
    code, found = findings(file, **SECRETS)
    (finding,) = [each for each in found if each["defeats"]]
    assert (code, finding["key"], finding["severity"]) == (0, "host.capacity_bytes", "warning")
    assert "use at least 1GiB" in finding["text"]
    last = run("check", str(file), **SECRETS).stdout.splitlines()[-1]
    assert last == f"{file}: a process starts with it, and cannot do what is set: host.capacity_bytes"


def test_keys_by_their_beginning() -> None:
    found = json.loads(run("keys", "pool_service.redis_t", "--json").stdout)["keys"]
    assert [key["key"] for key in found] == ["pool_service.redis_ttl_s", "pool_service.redis_timeout_s"]
    wrong = run("keys", "pol")
    assert (wrong.returncode, "no key begins with 'pol'" in wrong.stderr) == (1, True)


def test_the_page_is_what_the_command_prints() -> None:
    assert PAGE.read_text() == markdown_page(keys()), "kvtier config keys --markdown > docs/configuration.md"
