# The cache pool service: what `kvtier pool serve` needs and no more; no torch, no compiler, no pip. With KVTIER_EXTRAS=gateway
# also what `kvtier gateway serve` needs.
# docs/deployment.md says how to run it. A package index other than pip's default: --build-arg PIP_INDEX_URL=...

# A tag may point to another image tomorrow: docs/deployment.md says how to pin it by its digest.
ARG BASE_IMAGE=python:3.11-slim-bookworm

FROM ${BASE_IMAGE} AS dependencies
ARG PIP_INDEX_URL
# Extras of kvtier: "seal" is 16 MB that only pools with storage keys need, "gateway" makes the gateway's image. Each has a lock
# file of its own.
ARG KVTIER_EXTRAS
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
RUN python -m venv --without-pip /opt/kvtier
# From lock files alone (`make lock`): a file whose SHA-256 is not in them is not installed, whatever index it comes from, and a
# change of the source does not download them again.
COPY deploy/locks /build/locks
RUN pip --python /opt/kvtier/bin/python install --no-compile --only-binary :all: --require-hashes \
        -r /build/locks/pool${KVTIER_EXTRAS:+-$KVTIER_EXTRAS}.txt \
    && find /opt/kvtier -type d -name tests -prune -exec rm -r {} + \
    && find /opt/kvtier -name '*.pyi' -delete
RUN pip install --no-compile --only-binary :all: --require-hashes --target /build/backend -r /build/locks/build.txt

FROM dependencies AS build
COPY . /build
# Beside the environment, so that the final image has a layer of dependencies and a small one of kvtier.
RUN PYTHONPATH=/build/backend pip wheel --no-deps --no-build-isolation --no-index --wheel-dir /build/wheel /build \
    && pip --python /opt/kvtier/bin/python install --no-compile --no-deps --no-index --prefix /build/installed /build/wheel/*.whl \
    && cp -a /build/installed/. /opt/kvtier
# The base image comes without bytecode of the standard library, and compiling costs a start most of its time.
# One start leaves here the bytecode of exactly what a start imports.
RUN PYTHONPYCACHEPREFIX=/build/bytecode /opt/kvtier/bin/python /build/deploy/first_start.py

FROM ${BASE_IMAGE}
ARG BASE_IMAGE
ARG KVTIER_REVISION
LABEL org.opencontainers.image.title="kvtier cache pool" \
      org.opencontainers.image.description="A cache of KV blocks for LLM inference that engines share" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE_IMAGE}" \
      org.opencontainers.image.revision="${KVTIER_REVISION}"
# A volume takes over the owner that its mount point has here.
RUN install -d -o 10001 -g 10001 -m 0700 /var/lib/kvtier /run/kvtier
COPY --from=dependencies /opt/kvtier /opt/kvtier
COPY --from=build /build/installed /opt/kvtier
COPY --from=build /build/bytecode /opt/kvtier/bytecode
COPY deploy/health.py /opt/kvtier/health.py
COPY deploy/pool.toml /etc/kvtier/kvtier.toml
ENV PATH=/opt/kvtier/bin:$PATH \
    PYTHONPYCACHEPREFIX=/opt/kvtier/bytecode \
    PYTHONDONTWRITEBYTECODE=1 \
    OPENBLAS_NUM_THREADS=1
# A number: an orchestrator can see that it is not root. Engines that share the Unix socket are in the same group.
USER 10001:10001
EXPOSE 7600 7601 7602
VOLUME /var/lib/kvtier
HEALTHCHECK --interval=5s --timeout=5s --start-period=10s --retries=3 CMD ["python", "/opt/kvtier/health.py"]
ENTRYPOINT ["kvtier"]
CMD ["pool", "serve", "--config", "/etc/kvtier/kvtier.toml"]
