"""Asks Sentinels for the master of a service, and says what they answer where there is none."""

from typing import Any

import redis
from redis.sentinel import MasterNotFoundError, Sentinel


class UnknownServiceError(MasterNotFoundError):
    """Sentinels answer, and none of them knows the service."""


class Sentinels(Sentinel):
    """redis-py's, whose own errors show its inside."""

    def discover_master(self, service_name: str) -> tuple[str, int]:
        """Host and port of the master, by the first Sentinel that knows one; it is asked first the next time.

        :raises MasterNotFoundError: there is none. `AuthenticationError`: all of them refuse the password.
        """
        sentinels: list[Any] = self.sentinels
        may_be_asked: Any = self.check_master_state
        failures: list[redis.RedisError] = []
        known: dict[str, Any] = {}
        for place, sentinel in enumerate(sentinels):
            try:
                masters: dict[str, Any] = sentinel.sentinel_masters()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                failures.append(error)
                continue
            state = masters.get(service_name)
            if state and may_be_asked(state, service_name):
                sentinels[0], sentinels[place] = sentinel, sentinels[0]
                return state["ip"], state["port"]
            known |= masters
        if len(failures) == len(sentinels):
            if isinstance(failures[-1], redis.AuthenticationError):
                raise failures[-1]
            raise MasterNotFoundError(f"no Sentinel answers: {failures[-1]}")
        if service_name in known:
            raise MasterNotFoundError("the Sentinels say that the master is down, and have no other one yet")
        names = ", ".join(map(repr, sorted(known))) or "none at all"
        raise UnknownServiceError(
            f"the Sentinels know no service {service_name!r}, but {names}: name that of the Redis in the URL"
        )
