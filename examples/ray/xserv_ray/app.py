"""The application of Ray Serve: gateways, which clients reach, and engines, which compute."""

from __future__ import annotations

import shlex
from typing import Any, Dict, Optional, Union

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from starlette.types import ASGIApp
from xserv_server.cli import allowed_hosts_of, options_parser

from .engine import Engine
from .gateway import gateway_app


class Arguments(BaseModel):
    """The settings of an application: `serve run xserv_ray.app:build model=FOLDER replicas=2`, or `args` in a
    configuration file.

    model: a folder, or a repo id that is in the local Hugging Face cache, of every machine that has a replica.
    options: more options of xserv-server, as on its command line. Its address and its limits of connections are Ray's
        affair; --host says whether clients reach this machine by names of its own, and --grace how long a replica that
        is taken away may finish its answers.
    replicas: their number, unless max_replicas is given.
    min_replicas, max_replicas: between them the number follows the load: so many that each has target_requests running.
    upscale_seconds, downscale_seconds: how long the load must have been so.
    gpus: of each replica; 0: on the CPU. Less than 1: several replicas share a GPU, and --max-memory-bytes says how.
    cpus: of each replica, for Ray's accounts.
    gateways: processes between clients and replicas.
    health_seconds: between two questions after a replica's health.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    options: str = ""
    replicas: int = Field(default=1, ge=1)
    min_replicas: int = Field(default=1, ge=0)
    max_replicas: Optional[int] = Field(default=None, ge=1)
    target_requests: float = Field(default=32, gt=0)
    upscale_seconds: float = Field(default=10, ge=0)
    downscale_seconds: float = Field(default=300, ge=0)
    gpus: float = Field(default=0, ge=0)
    cpus: float = Field(default=1, ge=0)
    gateways: int = Field(default=1, ge=1)
    health_seconds: float = Field(default=10, gt=0)


def build(arguments: Union[Arguments, Dict[str, Any]]) -> Application:
    """Makes the application, for serve.run() or `serve run`. Raises ValueError for options that there are not."""
    if not isinstance(arguments, Arguments):
        arguments = Arguments(**arguments)
    options = [arguments.model, *shlex.split(arguments.options)]
    try:
        parsed = options_parser().parse_args(options)
    except SystemExit:
        raise ValueError(f"{arguments.options!r} are no options of xserv-server, see above") from None

    number: Dict[str, Any] = {"num_replicas": arguments.replicas}
    if arguments.max_replicas is not None:
        number["num_replicas"] = None
        number["autoscaling_config"] = AutoscalingConfig(
            min_replicas=arguments.min_replicas,
            max_replicas=arguments.max_replicas,
            target_ongoing_requests=arguments.target_requests,
            upscale_delay_s=arguments.upscale_seconds,
            downscale_delay_s=arguments.downscale_seconds,
            metrics_interval_s=min(10.0, max(arguments.upscale_seconds / 2, 0.1)),
            look_back_period_s=min(30.0, max(arguments.upscale_seconds, 0.2)),
        )
    engines = serve.deployment(
        name="Engine",
        # Requests beyond these wait in the gateway, where the queue has its limit.
        max_ongoing_requests=parsed.max_running,
        max_queued_requests=parsed.max_queued or 1,
        ray_actor_options={"num_cpus": arguments.cpus, "num_gpus": arguments.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class="xserv_ray.router.PrefixRouter"  # type: ignore[arg-type]  # Ray's annotation is of its stored form
        ),
        graceful_shutdown_timeout_s=parsed.grace,
        graceful_shutdown_wait_loop_s=1.0,
        health_check_period_s=arguments.health_seconds,
        **number,
    )(Engine)

    def build_gateway() -> ASGIApp:
        # As in the server: this long in the queue, and as long for the answer.
        handle = serve.get_deployment_handle("Engine", app_name=serve.get_replica_context().app_name)
        return gateway_app(handle, parsed.max_body_bytes, allowed_hosts_of(parsed), 2 * parsed.request_seconds)

    gateways = serve.deployment(
        name="Gateway",
        num_replicas=arguments.gateways,
        max_ongoing_requests=parsed.max_connections,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=parsed.grace,
    )(serve.ingress(build_gateway)())
    application: Application = gateways.bind(engines.bind(options))
    return application
