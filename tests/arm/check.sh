#!/usr/bin/env bash
# The NEON kernels on a machine of another kind: cpp/check.cpp compiled for aarch64 and run on
# emulated CPUs with i8mm, with dotprod alone and with neither. All that run must equal the scalar
# kernel bit for bit, and none may run that the CPU lacks.
#
# Wanted: aarch64-linux-gnu-g++ and qemu-aarch64. Taken from PATH; else Debian's packages are
# unpacked under .arm/ (65 MB to fetch; no root needed); else, as root, installed by apt.
# cpp/bind.cpp is left out: it needs Python's headers for aarch64. Exit code 3: no tools to be had.
set -euo pipefail
cd "$(dirname "$0")/../.."

UNPACKED=$PWD/.arm/root BUILD=$PWD/.arm/build
SEED=${SEED:-0}
COMPILER=() EMULATOR=

fail() {
  echo "make arm: $*" >&2
  exit 1
}

# Sets COMPILER and EMULATOR from PATH.
on_path() {
  command -v aarch64-linux-gnu-g++ > /dev/null || return 1
  EMULATOR=$(command -v qemu-aarch64 || command -v qemu-aarch64-static) || return 1
  COMPILER=(aarch64-linux-gnu-g++)
}

# Sets them from .arm/root. Libraries that this machine lacks lie there too.
unpacked() {
  local compiler=$UNPACKED/usr/bin/aarch64-linux-gnu-g++ emulator
  [ -x "$compiler" ] || return 1
  for emulator in qemu-aarch64-static qemu-aarch64; do
    [ ! -x "$UNPACKED/usr/bin/$emulator" ] || EMULATOR=$UNPACKED/usr/bin/$emulator
  done
  [ -n "$EMULATOR" ] || return 1
  COMPILER=("$compiler" "--sysroot=$UNPACKED")
  local libraries
  libraries=$(echo "$UNPACKED"/usr/lib/*-linux-gnu | tr ' ' :)
  export LD_LIBRARY_PATH=$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
}

# What the two need, by apt with lists and a cache of its own, to .arm/root. As if nothing were
# installed, so that it does not matter what this machine's package manager believes; then without
# the packages of its own kind that are there.
download() {
  command -v apt-get > /dev/null && command -v dpkg > /dev/null || return 1
  local state=$PWD/.arm/apt name
  rm -rf "$state" "$UNPACKED" "$UNPACKED.partial"
  mkdir -p "$state/lists/partial" "$state/cache/archives/partial" "$state/debs"
  : > "$state/status"
  local options=(-qq -o "Dir::State::lists=$state/lists" -o "Dir::State::status=$state/status"
    -o "Dir::Cache=$state/cache" -o Debug::NoLocking=1 -o APT::Sandbox::User=
    -o Acquire::Retries=1 -o Acquire::http::Timeout=20 -o Acquire::https::Timeout=20)
  apt-get "${options[@]}" update || return 1
  local emulator=qemu-user-static
  apt-cache "${options[@]}" show "$emulator" > /dev/null 2>&1 || emulator=qemu-user
  apt-get "${options[@]}" --yes --no-install-recommends --print-uris install \
    g++-aarch64-linux-gnu "$emulator" | sed -n "s/^'[^']*' \([^_]*\)_.*/\1/p" \
    > "$state/closure" || return 1
  dpkg-query -W -f='${Package} ${db:Status-Status}\n' | sed -n 's/ installed$//p' \
    > "$state/installed"
  local wanted=()
  while read -r name; do
    case $name in
      *aarch64-linux-gnu* | *arm64-cross* | qemu-user*) wanted+=("$name") ;;
      *) grep -qxF "$name" "$state/installed" || wanted+=("$name") ;;
    esac
  done < "$state/closure"
  echo "unpacking ${#wanted[@]} packages under .arm/"
  (cd "$state/debs" && apt-get "${options[@]}" download "${wanted[@]}") || return 1
  for name in "$state"/debs/*.deb; do dpkg -x "$name" "$UNPACKED.partial" || return 1; done
  mv "$UNPACKED.partial" "$UNPACKED"
  rm -rf "$state"
}

install_as_root() {
  [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null || return 1
  apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes \
    --no-install-recommends g++-aarch64-linux-gnu qemu-user > /dev/null
}

if on_path; then echo "compiler and emulator: from PATH"
elif unpacked || { download && unpacked; }; then echo "compiler and emulator: from .arm/"
elif install_as_root && on_path; then echo "compiler and emulator: installed by apt"
else
  echo "make arm: no aarch64-linux-gnu-g++ and qemu-aarch64 on PATH, and apt could not fetch or" \
    "install them; install g++-aarch64-linux-gnu and qemu-user, or their like" >&2
  exit 3
fi
"${COMPILER[@]}" --version | head -1
"$EMULATOR" --version | head -1
grep -q neoverse-n1 <<< "$("$EMULATOR" -cpu help || true)" ||  # it ends with 1
  fail "$EMULATOR knows no neoverse-n1; QEMU 7.0 or newer is wanted"

WARNINGS=(-Wall -Wextra -Wno-maybe-uninitialized -Wno-uninitialized)
# Flags as CMakeLists.txt gives them: FILE MACRO FLAGS of each NEON file, and EXACT.
NEON=$(sed -nE 's|^ *instruction_set\((cpp/neon_\S+) (\S+) (.*)\)$|\1 \2 \3|p' CMakeLists.txt)
EXACT=$(sed -n 's/^set(EXACT \(.*\))$/\1/p' CMakeLists.txt)
[ "$(wc -l <<< "$NEON")" = 2 ] && [ -n "$EXACT" ] || fail "CMakeLists.txt names no two NEON files"
DEFINES=$(sed 's/^[^ ]* \([^ ]*\) .*/-D\1/' <<< "$NEON" | tr '\n' ' ')

rm -rf "$BUILD"
mkdir -p "$BUILD"
{
  sed "s/^\([^ ]*\) [^ ]* \(.*\)/\1 $EXACT \2/" <<< "$NEON"
  echo "cpp/scalar.cpp $EXACT"
  printf 'cpp/%s.cpp\n' check cpuid dispatch linear memory pack pool
} | BUILD=$BUILD xargs -P 2 -I '{}' bash -c '
  compiler=("$@"); set -- {}; file=$1; shift
  "${compiler[@]}" "$@" -c "$file" -o "$BUILD/$(basename "$file" .cpp).o"' _ \
  "${COMPILER[@]}" -std=c++20 -O3 "${WARNINGS[@]}" $DEFINES ||
  fail "the NEON files do not compile"
"${COMPILER[@]}" -static -pthread "$BUILD"/*.o -o "$BUILD/check" || fail "check does not link"

# CASES random products on this CPU, and as many from three threads at once, where exactly these
# instruction sets must run.
on_cpu() {
  local cpu=$1 cases=$2 wanted=$3
  "$EMULATOR" -cpu "$cpu" "$BUILD/check" "$cases" "$SEED" --no-fork > "$BUILD/said" 2>&1 ||
    { cat "$BUILD/said"; fail "$cpu: check failed"; }
  grep -qx "runs: $wanted" "$BUILD/said" && grep -qx "chosen: ${wanted%% *}" "$BUILD/said" ||
    { cat "$BUILD/said"; fail "$cpu: wanted $wanted"; }
  echo "$cpu: $wanted; $cases cases, twice: $(tail -1 "$BUILD/said")"
}

on_cpu max 1500 "neon-i8mm neon-dotprod scalar"
on_cpu neoverse-n1 300 "neon-dotprod scalar"
on_cpu cortex-a72 100 "scalar"
