#!/bin/sh
# A Docker engine that answers, or a clear word on how to get one.
#
# Exits 0 if an engine answers. Otherwise, as root on a Debian-like system, installs docker.io where dockerd is missing
# and starts dockerd without network set-up: sandboxes run with --network none, so neither a bridge nor iptables is
# needed. The daemon gets a session of its own and outlives this script; its log is $TRACED_DOCKERD_LOG
# (default /var/log/traced-dockerd.log). Else it says how to get an engine and exits 1.
# Not covered: rootless engines, other package formats, a remote DOCKER_HOST that does not answer (named, never replaced).
set -u

LOG=${TRACED_DOCKERD_LOG:-/var/log/traced-dockerd.log}
SOCKET=${TRACED_DOCKER_SOCKET:-/var/run/docker.sock}
WAIT_SECONDS=60

say() { printf 'docker-engine: %s\n' "$*" >&2; }

give_up() {
    say "$1"
    say "To get one: install Docker (https://docs.docker.com/engine/install/) and start it, then check with 'docker version';"
    say "or run this script as root on Debian or Ubuntu, which installs docker.io and starts dockerd;"
    say "or set DOCKER_HOST to an engine that answers."
    exit 1
}

# Debian's docker.io carries the client too, but python's docker or a bare socket must not be needed here:
# the engine's own /_ping answers over the socket.
answers() {
    if command -v docker >/dev/null 2>&1; then
        docker version --format '{{.Server.Version}}' >/dev/null 2>&1
    elif command -v curl >/dev/null 2>&1; then
        [ "$(curl -s --max-time 5 --unix-socket "$SOCKET" http://localhost/_ping 2>/dev/null)" = OK ]
    else
        return 1
    fi
}

install_engine() {
    command -v apt-get >/dev/null 2>&1 || give_up "no engine answers, dockerd is not installed, and apt-get is not here"
    say "installing docker.io"
    apt-get update -qq >&2 || give_up "apt-get update failed"
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends docker.io >&2 \
        || give_up "apt-get install docker.io failed"
}

start_engine() {
    say "starting dockerd, log in $LOG"
    setsid dockerd --host="unix://$SOCKET" --iptables=false --ip6tables=false --bridge=none \
        >>"$LOG" 2>&1 </dev/null &
    daemon=$!
    waited=0
    until answers; do
        kill -0 "$daemon" 2>/dev/null || { tail -n 5 "$LOG" >&2; give_up "dockerd ended while starting (log: $LOG)"; }
        [ "$waited" -lt "$WAIT_SECONDS" ] || give_up "dockerd did not answer within ${WAIT_SECONDS} s (log: $LOG)"
        sleep 1
        waited=$((waited + 1))
    done
    say "an engine answers (dockerd process $daemon)"
}

if answers; then
    exit 0
fi
[ -z "${DOCKER_HOST:-}" ] || give_up "DOCKER_HOST is '$DOCKER_HOST' and no engine answers there"
[ "$(id -u)" = 0 ] || give_up "no engine answers, and starting one needs root"
command -v dockerd >/dev/null 2>&1 || install_engine
start_engine
