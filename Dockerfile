# The daemon as an image:  docker build -t traced .
#
# BASE_IMAGE is any image with Python 3.11 or newer and pip; it needs no shell. Where no package index can be reached,
# take a base that has the dependencies and pass pip's own variables:
#   docker build --build-arg BASE_IMAGE=... --build-arg PIP_NO_DEPS=1 --build-arg PIP_NO_INDEX=1 \
#                --build-arg PIP_NO_BUILD_ISOLATION=0 -t traced .
# (PIP_NO_BUILD_ISOLATION=0 is how pip spells "no isolation" in its variables.)
#
# Not in the image: a Docker engine (mount its socket: compose.yaml). `traced backup` and `traced restore` of a PostgreSQL store call
# pg_dump and pg_restore: take a BASE_IMAGE that has them, or on a Debian one --build-arg APT_PACKAGES=postgresql-client (compose.yaml does).
# Run it with the machine's process ids (--pid=host), or the load of its own sandboxes and trainers looks like others'.
ARG BASE_IMAGE=python:3.11-slim
FROM ${BASE_IMAGE}

ARG PIP_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX PIP_NO_DEPS PIP_NO_BUILD_ISOLATION
# On a Debian base too: nothing else lives in this image.
ARG PIP_BREAK_SYSTEM_PACKAGES=1
WORKDIR /src

ARG APT_PACKAGES
RUN ["python3", "-c", "import os, subprocess as s; p = os.environ.get('APT_PACKAGES', '').split(); p and [s.run(['apt-get', *w], check=True) for w in (['update'], ['install', '-y', '--no-install-recommends', *p], ['clean'])]"]

# The dependencies first: a change of our own code does not install them again.
COPY pyproject.toml constraints.txt README.md LICENSE ./
RUN ["python3", "-m", "pip", "install", "--no-cache-dir", "--root-user-action=ignore", "-c", "constraints.txt", ".[postgres,otel]"]
COPY agents/ agents/
COPY sandbox/ sandbox/
COPY store/ store/
COPY traced/ traced/
RUN ["python3", "-m", "pip", "install", "--no-cache-dir", "--root-user-action=ignore", "--no-deps", "--force-reinstall", "."]

# Nobody's user, by number: the base need not know it. The data directory is its home, caches included.
RUN ["python3", "-c", "import os; os.makedirs('/data', 0o700, exist_ok=True); os.chown('/data', 10001, 10001)"]
ENV TRACED_DATA_DIR=/data HOME=/data USER=traced PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /data
VOLUME ["/data"]

# `traced` takes SIGTERM itself (it drains), also as process 1; `docker stop -t` must leave it service.drain_s seconds.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=60s --timeout=10s --start-period=120s --retries=3 \
    CMD ["python3", "-P", "-m", "traced", "status", "--alive"]
ENTRYPOINT ["python3", "-P", "-m", "traced"]
CMD ["up"]
