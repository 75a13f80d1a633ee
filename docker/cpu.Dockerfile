# kvstrata without a GPU: stage `build` compiles, stage `daemon` runs kvstratad, stage `engine` runs
# the small engine against it. Build: docker build -f docker/cpu.Dockerfile --target daemon .
FROM debian:12 AS build
COPY docker/packages.apt docker/install_packages.sh /src/docker/
RUN /src/docker/install_packages.sh
COPY . /src
ARG KVS_COMMIT=unknown
RUN cd /src && make build

FROM debian:12-slim AS daemon
COPY --from=build /src/docker/runtime.apt /tmp/runtime.apt
RUN apt-get -q update && apt-get -q install -y --no-install-recommends $(sed 's/#.*//' /tmp/runtime.apt) \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/build/bin/kvstratad /src/build/bin/kvstrata /usr/bin/
COPY --from=build /src/build/lib/libkvstrata.so* /usr/lib/
COPY --from=build /src/parameters/*.safetensors /usr/share/kvstrata/parameters/
VOLUME /run/kvstrata
HEALTHCHECK --interval=5s --timeout=3s CMD ["kvstrata", "--socket", "/run/kvstrata/kvstratad.sock", "health", "-q"]
ENTRYPOINT ["kvstratad", "--socket", "/run/kvstrata/kvstratad.sock"]

FROM build AS engine
WORKDIR /src
ENTRYPOINT ["/src/build/venv/bin/python", "integrations/demo.py"]
