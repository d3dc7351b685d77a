"""The samples of a /metrics page, fetched within a deadline and bounds."""

import ssl
import urllib.error
import urllib.request
from collections.abc import Iterable
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from kvtier.errors import ConfigError, InvalidInputError, UnavailableError

_OF_VLLM = "vllm:"
_OF_SECONDARY_TIER = {f"kvtier_tier_{rest}": f"kvtier_{rest}" for rest in ("corrupt_blocks_total", "io_errors_total")}
_STARTED = "process_start_time_seconds"
_COUNTED = ("_total", "_count", "_sum", "_bucket")
"""Ends of the names of what only grows as long as a process lives."""
_TIMEOUT_S = 5.0
_MAX_BYTES = 16 << 20
"""The most bytes of a page of metrics. Ours is about 20 KB; an address that answers with more is something else."""
_MAX_SAID_BYTES = 200
"""The most bytes that are shown of what a server says of a request that it refuses."""


_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")


class Samples:
    """Values by name and labels. Immutable.

    What kvtier counts within vLLM has the name that it has elsewhere: vLLM lets nobody add metrics without its prefix.
    """

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in map(_as_elsewhere, samples):
            self._by_name.setdefault(sample.name, []).append(sample)

    def names(self) -> list[str]:
        return list(self._by_name)

    def total(self, name: str, **labels: str) -> float:
        """Returns the sum of all samples that have these labels; 0 where there is none."""
        return sum(sample.value for sample in self._matching(name, labels))

    def value(self, name: str, **labels: str) -> float | None:
        """Returns the sum of all samples that have these labels; None where there is none."""
        found = self._matching(name, labels)
        return sum(sample.value for sample in found) if found else None

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Totals by the values of one label, in the order of the page; values of zero are left out."""
        totals: dict[str, float] = {}
        for sample in self._matching(name, labels):
            of = sample.labels.get(label, "")
            totals[of] = totals.get(of, 0.0) + sample.value
        return {of: total for of, total in totals.items() if total}

    def values_of(self, name: str, label: str) -> set[str]:
        """Returns what samples of this name have for a label, whatever their value is."""
        return {sample.labels[label] for sample in self._by_name.get(name, ()) if label in sample.labels}

    def label(self, name: str, label: str) -> str | None:
        """Returns what the first sample of this name has for a label; None where there is none."""
        return next((s.labels[label] for s in self._by_name.get(name, ()) if label in s.labels), None)

    def since(self, before: "Samples") -> "Samples | None":
        """Returns what counters gained since an earlier page of the same process; gauges are as they are now.

        None: it is not the same process any more, by its start or since a counter has lost.
        """
        if self.value(_STARTED) != before.value(_STARTED):
            return None
        known = {_identity(name, s): s.value for name, found in before._by_name.items() for s in found}
        gained: list[Sample] = []
        for name, found in self._by_name.items():
            if not name.endswith(_COUNTED):
                gained += found
                continue
            for sample in found:
                amount = sample.value - known.get(_identity(name, sample), 0.0)
                if amount < 0:
                    return None
                gained.append(sample._replace(value=amount))
        return Samples(gained)

    def _matching(self, name: str, labels: dict[str, str]) -> list[Sample]:
        return [s for s in self._by_name.get(name, ()) if labels.items() <= s.labels.items()]


def _as_elsewhere(sample: Sample) -> Sample:
    """The sample as processes of ours have it. The secondary tier of vLLM's own offloading is a pool, and has a `tier`
    in its names instead of a label."""
    if not sample.name.startswith(f"{_OF_VLLM}kvtier_"):
        return sample
    name = sample.name.removeprefix(_OF_VLLM)
    if name.startswith("kvtier_tier_") and "tier" not in sample.labels:
        name = _OF_SECONDARY_TIER.get(name, name)
        return sample._replace(name=name, labels={**sample.labels, "tier": "pool"})
    return sample._replace(name=name)


def _identity(name: str, sample: Sample) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset(sample.labels.items())


def parse(page: str, *, source: str) -> Samples:
    """The samples of a page in Prometheus' text format. Raises `InvalidInputError` when it is none."""
    try:
        return Samples(sample for family in text_string_to_metric_families(page) for sample in family.samples)
    except (ValueError, IndexError, KeyError) as error:
        raise InvalidInputError(f"{source} answers with something that is no metrics page: {error}") from error


def fetch(url: str, *, ca: Path | None = None, token: str | None = None) -> Samples:
    """Returns the samples of a page. Blocks and raises as `get` does."""
    return parse(get(url, ca=ca, token=token).decode("utf-8", errors="replace"), source=url)


def get(url: str, *, ca: Path | None = None, token: str | None = None) -> bytes:
    """What a server answers. Blocks up to some seconds. Raises `UnavailableError` when nobody answers,
    `InvalidInputError` for more than a page of metrics has, and `ConfigError` where a token would go in the clear.

    :param url: as `metrics_url` gives it.
    :param ca: CAs, in PEM, of an https server's certificate; without, the system's.
    :param token: shown as a bearer token, over https or to this machine.
    """
    request = urllib.request.Request(url)
    if token is not None:
        _require_private(url)
        request.add_header("Authorization", f"Bearer {token}")
    context = None
    if url.startswith("https:"):
        try:
            context = ssl.create_default_context(cafile=ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"--ca {ca}: cannot read certificates: {error}") from error
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=context) as answer:
            page: bytes = answer.read(_MAX_BYTES + 1)
    except urllib.error.HTTPError as error:
        hint = _said(error) or "is it an engine or a pool?"
        raise UnavailableError(f"{url} answers {error.code} {error.reason}: {hint}") from error
    except (OSError, ValueError, HTTPException) as error:  # URLError is an OSError; the others: no HTTP at all
        reason = getattr(error, "reason", error)
        unknown_ca = isinstance(reason, ssl.SSLCertVerificationError)
        remedy = "; name the CA that has signed its certificate by --ca" if unknown_ca else ""
        raise UnavailableError(f"{url} does not answer: {reason}{remedy}") from error
    if len(page) > _MAX_BYTES:
        raise InvalidInputError(f"{url} answers with more than {_MAX_BYTES:,} bytes: that is no metrics page of ours")
    return page


def _require_private(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme != "https" and parts.hostname not in _THIS_MACHINE:
        raise ConfigError(f"--token would go to {parts.netloc} in the clear: use https, or ask on the pool's host")


def _said(refusal: urllib.error.HTTPError) -> str:
    """What a pool says in such an answer: which port it is, or why it refuses."""
    if refusal.code not in (HTTPStatus.BAD_REQUEST, HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return ""
    try:
        words = refusal.read(_MAX_SAID_BYTES).decode("utf-8", errors="replace")
    except (OSError, HTTPException):
        return ""
    return "".join(filter(str.isprintable, words))


def metrics_url(text: str) -> str:
    """`http://host:port/metrics` from that, from `host:port`, or from anything between."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and parts.hostname is not None and parts.port != 0
    except ValueError:
        named = False
    if not named:
        raise ConfigError(f"{text!r}: name an engine or a pool as http://host:port or host:port, the port not 0")
    return url if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/metrics"


def reachable(address: str) -> str:
    """Returns where the server at `host:port` is asked from its own machine: on the loopback, if on all addresses."""
    host, _, port = address.rpartition(":")
    return {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "[::]": "[::1]"}.get(host, host) + f":{port}"
