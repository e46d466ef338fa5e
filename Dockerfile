# All programs of Gainshare in one image, for people who build with Docker:
#   docker build -t gainshare:dev . && kind load docker-image gainshare:dev
# `cargo xtask image` makes an image of the same programs in the same places without Docker.

FROM rust:1-slim-trixie AS build
WORKDIR /src
COPY . .
RUN cargo build --release --locked \
        --package gainshare --package gainshare-operator --package gainshare-node-agent --package kubectl-gainshare \
        --package gainshare-inside \
    && mkdir /programs \
    && for program in gainshare gainshare-operator gainshare-node-agent kubectl-gainshare libgainshare_inside.so; do \
           strip -o "/programs/$program" "target/release/$program"; \
       done

# The same Debian release as above: the programs need its C library.
FROM debian:trixie-slim
COPY --from=build /programs/ /usr/local/bin/
# `operator` and `agent` replace the process by the program of that task in the same folder. The chart sets user and
# rights.
ENTRYPOINT ["/usr/local/bin/gainshare"]
