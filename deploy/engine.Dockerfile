# The image of the service `engine` in compose.yaml: Debian's Docker engine and its client. Build it
# from the top folder of the project:
#
#     docker build --file deploy/engine.Dockerfile --tag llm-sandbox-proxy/engine .
FROM debian:bookworm-slim
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    ca-certificates docker.io iptables \
 && apt-get clean && rm -rf /var/lib/apt/lists/*
# Certificates, in PEM, of a network that replaces those of the sites beyond it.
ARG CA_CERTIFICATES=""
RUN cd /usr/local/share/ca-certificates \
 && printf '%s\n' "$CA_CERTIFICATES" \
  | awk '/BEGIN CERTIFICATE/ { n++ } n { print > "network-" n ".crt" }' \
 && update-ca-certificates
# The user and the uids that --userns-remap=default takes. The files in the engine's volume belong to
# these uids, so they must not change.
RUN useradd --system dockremap \
 && echo dockremap:165536:65536 | tee /etc/subuid >/etc/subgid
COPY deploy/engine-entrypoint /usr/local/bin/engine-entrypoint
ENV DOCKER_HOST=unix:///run/engine/docker.sock
# The engine does not wait for the processes that hold its containers, so an init does.
ENTRYPOINT ["docker-init", "--", "engine-entrypoint"]
# The group is the proxy's, in whose container the socket is opened. There is no TCP port.
CMD ["dockerd", "--host=unix:///run/engine/docker.sock", "--group=1000", "--userns-remap=default"]
