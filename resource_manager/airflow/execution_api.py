"""Airflow's execution API in a triggerer, by which triggers read connections, Variables and XComs."""

from __future__ import annotations

import asyncio

import httpx


def build_execution_api() -> None:
    """Build what this triggerer asks Airflow by, before it runs triggers.

    Airflow builds it at the first question, in 5 s of processor time, in which no job begins and no lease is
    renewed.
    """
    from airflow.api_fastapi.execution_api.app import InProcessExecutionAPI
    from airflow.jobs import triggerer_job_runner

    api = InProcessExecutionAPI()

    async def ask() -> None:
        """Ask for a page that there is not: the routes of all versions are made for any first request."""
        async with httpx.AsyncClient(
            transport=api.atransport, base_url="http://in-process.invalid"
        ) as client:
            await client.get("/")

    asyncio.run(ask())
    triggerer_job_runner.in_process_api_server = lambda: api
