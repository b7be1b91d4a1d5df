"""Many replicas of a web application behind one address, by Ray Serve.

Ray starts a new replica where one dies, and spreads requests over them. What is served is the
caller's: a class that builds an ASGI application, which is made anew in each replica.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from trappm.cluster.ray_runtime import ray_runtime
from trappm.profiler.errors import InputError, from_extra, one_line

NAME = "trappm"

_ONE_THREAD = (
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP",
    "RAY_SERVE_LOG_TO_STDERR",
)
"""What Ray Serve does for applications that block, which ours does not; it costs each request."""


def serve_replicas(
    application: type[Any],
    settings: object,
    *,
    host: str,
    port: int,
    replicas: int,
    requests_at_once: int,
    requests_waiting: int,
    address: str | None,
    listening: Callable[[], None],
) -> None:
    """Serves until it is interrupted or terminated; called in the main thread.

    Args:
        application: has `__serve_build_asgi_app__`, and travels to each replica.
        settings: of the application; travel with it.
        host: the address to listen at.
        port: of the proxy.
        replicas: how many processes.
        requests_at_once: that one replica works on.
        requests_waiting: at the proxy; beyond, Ray answers 503.
        address: of a Ray cluster; None for a private Ray on this machine.
        listening: called once it can be asked.

    Raises:
        KeyboardInterrupt: it was interrupted or terminated; Ray has been shut down.
        InputError: Ray Serve is not installed, or cannot start the application.
        CampaignError: Ray cannot be started or reached.
    """
    for name in _ONE_THREAD:  # in replicas as here
        os.environ.setdefault(name, "0")
    quiet = {"log_level": "WARNING"}
    with ray_runtime(address):
        # Ray would end us at once, and leave its own processes to themselves.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with from_extra("serve", "--replicas"):
            from ray import serve
        logging.getLogger("ray.serve").setLevel(logging.WARNING)
        options = _options(replicas, requests_at_once, requests_waiting)
        deployment: Any = serve.deployment(**options)(serve.ingress()(application))
        try:
            serve.start(
                proxy_location="HeadOnly",
                http_options={"host": host, "port": port},
                logging_config=quiet,
            )
            serve.run(deployment.bind(settings), name=NAME, logging_config=quiet)
            listening()
            threading.Event().wait()
        except RuntimeError as error:
            raise InputError(f"Ray Serve cannot start it: {one_line(error)}") from error
        finally:
            serve.shutdown()


def _options(replicas: int, requests_at_once: int, requests_waiting: int) -> dict[str, Any]:
    return {
        "name": NAME,
        "num_replicas": replicas,
        "max_ongoing_requests": requests_at_once,
        "max_queued_requests": requests_waiting,
        "ray_actor_options": {"num_cpus": 0},
    }
