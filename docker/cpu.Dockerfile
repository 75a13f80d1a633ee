# SPDX-License-Identifier: Apache-2.0
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
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 10001 kvstrata && useradd --uid 10001 --gid 10001 --no-log-init --home-dir /var/lib/kvstrata kvstrata \
    && install -d -o kvstrata -g kvstrata /run/kvstrata && install -d -m 700 -o kvstrata -g kvstrata /var/lib/kvstrata
COPY --from=build /src/build/bin/kvstratad /src/build/bin/kvstrata /usr/bin/
COPY --from=build /src/build/lib/libkvstrata.so* /usr/lib/
COPY --from=build /src/parameters/*.safetensors /usr/share/kvstrata/parameters/
COPY --from=build /src/integrations/mooncake_agent/agent.py /usr/share/kvstrata/mooncake_agent/
COPY --from=build /src/LICENSE /usr/share/doc/kvstrata/
# A number, so that Kubernetes can see that it is not root. Volumes get this user's folders as they are.
USER 10001:10001
VOLUME /run/kvstrata /var/lib/kvstrata
# For the daemon and for `docker exec ... kvstrata status` alike.
ENV KVSTRATA_SOCKET=/run/kvstrata/kvstratad.sock
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s CMD ["kvstrata", "health", "-q"]
ENTRYPOINT ["kvstratad"]

FROM build AS engine
WORKDIR /src
ENTRYPOINT ["/src/build/venv/bin/python", "integrations/demo.py"]
