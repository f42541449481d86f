# The guest agent for Pods of any image: an init container copies /agent from this image. Build it from
# the top folder of the project, once for each release of the proxy and each architecture of the nodes:
#
#     docker build --file deploy/agent.Dockerfile --tag llm-sandbox-proxy/agent .
#
# A sandbox image can hold the agent itself instead, which saves the init container:
#
#     COPY --from=llm-sandbox-proxy/agent /agent /.agent/agent
FROM debian:bookworm-slim AS build
RUN apt-get update \
 && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    busybox-static gcc musl-tools
WORKDIR /source
COPY sandbox_runtime sandbox_runtime
# `true` stands in for Python, which only other compilers need.
RUN sh sandbox_runtime/guest/native/build true && mv sandbox_runtime/guest/bin/agent-* /agent

FROM scratch
COPY --from=build /bin/busybox /bin/cp
COPY --from=build /agent /agent
