# One image for the four services: the command chooses which one a container is.
#
#   docker build -t hearth .
#   docker run --rm hearth python -m services.history      (its settings are environment variables, see docs/operating.md)

FROM python:3.11-slim-bookworm AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src

# Every package of the lock, by its hash. From here on nothing else is asked for, so what is installed is what was tested.
COPY requirements.lock ./
RUN python -m pip wheel --require-hashes --no-deps --requirement requirements.lock --wheel-dir /wheels
RUN python -m venv /build \
    && /build/bin/pip install --no-index --find-links /wheels \
       hatchling googleapis-common-protos grpcio-tools mypy-protobuf

COPY pyproject.toml README.md LICENSE ./
COPY protos protos
COPY scripts scripts
COPY hearth hearth
COPY services services
RUN /build/bin/pip wheel --no-index --no-deps --no-build-isolation --wheel-dir /dist .

RUN python -m venv /opt/hearth \
    && /opt/hearth/bin/pip install --no-index --find-links /wheels --find-links /dist "hearth[daytona]" \
    && /opt/hearth/bin/pip check \
    && /opt/hearth/bin/pip uninstall --yes pip setuptools


FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="hearth" \
      org.opencontainers.image.description="A session runtime for coding agents" \
      org.opencontainers.image.licenses="Apache-2.0"

# Sandboxes of the provider `local` lie here; the other services write nothing but temporary files.
RUN groupadd --gid 10001 hearth \
    && useradd --uid 10001 --gid hearth --home-dir /var/lib/hearth --no-create-home --shell /usr/sbin/nologin hearth \
    && install -d -o hearth -g hearth -m 0755 /var/lib/hearth /var/lib/hearth/sandboxes

COPY --from=build /opt/hearth /opt/hearth

ENV PATH=/opt/hearth/bin:/usr/local/bin:/usr/bin:/bin \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HEARTH_LOCAL_ROOT=/var/lib/hearth/sandboxes
WORKDIR /var/lib/hearth
USER 10001:10001

STOPSIGNAL SIGTERM
EXPOSE 7400 7401 7402 7403 9464
# Asks the service of this container, by its HEARTH_LISTEN, whether it serves.
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["hearth", "health"]
CMD ["hearth", "--help"]
