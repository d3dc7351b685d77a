"""Two vLLM engines share a prefix through the cache pool: python examples/vllm_two_engines.py MODEL_FOLDER

One after the other, as if on two hosts: what the first has computed, the second loads. Needs vLLM and kvtier in one
environment; `make .venv/vllm` makes one for the CPU.
"""

import hashlib
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

QUESTIONS = ("What is it about?", "Who wrote it?")
ENGINE = """
import sys, time
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

def main():
    model, config, question = sys.argv[1:]
    transfer = KVTransferConfig(
        kv_connector="KvtierConnector", kv_connector_module_path="kvtier_vllm", kv_role="kv_both",
        kv_load_failure_policy="recompute", kv_connector_extra_config={"config": config},
    )
    llm = LLM(model, kv_transfer_config=transfer, enforce_eager=True, block_size=32, max_model_len=2048)
    document = " ".join(f"Line {i} of a long document says {i * i}." for i in range(80))
    start = time.monotonic()
    (answer,) = llm.generate([document + " " + question], SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    print(f"{answer.num_cached_tokens} of {len(answer.prompt_token_ids)} tokens from the cache, "
          f"first token after {time.monotonic() - start:.2f} s", flush=True)

if __name__ == "__main__":
    main()
"""
POOL = """
[pool_service]
listen = ["unix:{folder}/pool.sock"]
grpc_listen = []
http_listen = "127.0.0.1:0"
memory_bytes = "512MiB"
[tenants.default]
token_sha256 = ["{digest}"]
"""
SHARED = """
tenant = "default"
[tenants.default]
secret = "env:KVTIER_SECRET"
token = "env:KVTIER_TOKEN"
[host]
capacity_bytes = "256MiB"
[pool]
address = "unix:{folder}/pool.sock"
"""


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    model = sys.argv[1]
    token = secrets.token_hex(32)
    environ = os.environ | {"KVTIER_SECRET": secrets.token_hex(32), "KVTIER_TOKEN": token}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        digest = hashlib.sha256(token.encode()).hexdigest()
        (folder / "pool.toml").write_text(POOL.format(folder=folder, digest=digest))
        (folder / "kvtier.toml").write_text(SHARED.format(folder=folder))
        (folder / "engine.py").write_text(ENGINE)
        serve = [sys.executable, "-m", "kvtier.cli.main", "pool", "serve", "--config", str(folder / "pool.toml")]
        with subprocess.Popen(serve, env=environ, stdout=subprocess.PIPE, text=True) as pool:
            try:
                assert pool.stdout is not None
                if not pool.stdout.readline().startswith("ready"):
                    sys.exit("The pool has not started: its reason stands above.")
                for question in QUESTIONS:
                    print(f"An engine is asked: {question}", flush=True)
                    engine = [sys.executable, str(folder / "engine.py"), model, str(folder / "kvtier.toml"), question]
                    subprocess.run(engine, env=environ, check=True)
            finally:
                pool.terminate()


if __name__ == "__main__":
    main()
