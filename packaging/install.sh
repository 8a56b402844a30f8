#!/bin/sh
# Install, update or remove uma-trio for one user, without a compiler.
#
#     sh install.sh [--from FOLDER_OR_URL] [--prefix ~/.local] [--remove]
#
# The files of a release come from the folder that this script lies in, from --from, or from the project's newest
# release; they are checked against SHA256SUMS. What they depend on comes from the package index (or from what
# PIP_FIND_LINKS and UV_FIND_LINKS name). Everything goes into PREFIX/share/uma-trio, with the programs in PREFIX/bin;
# an installation that fails leaves the old one as it was. Settings and models are never touched.
# Needs Python 3.11 or newer with venv, or uv.

set -eu

RELEASES=https://github.com/uma-trio/uma-trio/releases/latest/download
PROGRAMS="uma-trio umad uma-cli"
BASH_COMPLETION=bash-completion/completions/uma-trio
ZSH_COMPLETION=zsh/site-functions/_uma-trio
FISH_COMPLETION=fish/vendor_completions.d/uma-trio.fish
MANUAL=man/man1/uma-trio.1

main() {
    from='' prefix="$HOME/.local" remove=no
    while [ $# -gt 0 ]; do
        case $1 in
            --from) from=${2:?--from needs a folder or a URL}; shift ;;
            --prefix) prefix=${2:?--prefix needs a folder}; shift ;;
            --remove) remove=yes ;;
            -h | --help) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 0 ;;
            *) fail "unknown argument $1; use --from, --prefix or --remove" ;;
        esac
        shift
    done
    case $prefix in "~"*) prefix=$HOME${prefix#\~} ;; esac
    case $prefix in /*) ;; *) prefix=$PWD/$prefix ;; esac
    home=$prefix/share/uma-trio
    if [ "$remove" = yes ]; then
        uninstall
        exit 0
    fi
    python=$(find_python) || fail "no Python 3.11 or newer here. Install one (Debian, Ubuntu: sudo apt install python3 \
python3-venv) or uv (https://docs.astral.sh/uv), then run this again."
    files=$(mktemp -d)
    trap 'rm -rf "$files"' EXIT
    trap 'exit 130' INT
    trap 'exit 143' TERM
    collect_release
    install_environment
    link_programs
    write_share
    echo "Installed $("$home/bin/uma-trio" --version) in $home. Next: uma-trio serve"
    case :$PATH: in
        *":$prefix/bin:"*) ;;
        *) echo "$prefix/bin is not on your PATH: add it in your shell's start-up file, or start $prefix/bin/uma-trio" ;;
    esac
    echo "To update, run the newer install.sh; to remove: sh install.sh --remove"
}

fail() {
    echo "install.sh: $*" >&2
    exit 1
}

# Print an interpreter that is new enough, or "uv", which fetches one.
find_python() {
    for name in ${PYTHON:-} python3 python3.14 python3.13 python3.12 python3.11; do
        if "$name" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$name"
            return 0
        fi
    done
    command -v uv >/dev/null && echo uv
}

run_python() {
    if [ "$python" = uv ]; then
        uv run --quiet --no-project --python '>=3.11' python "$@"
    else
        "$python" "$@"
    fi
}

# Have the wheels for this machine in $files, each as its line of SHA256SUMS says.
collect_release() {
    if [ -z "$from" ]; then
        from=$RELEASES
        # Not when this text comes through a pipe.
        if [ -f "$0" ] && [ -f "$(dirname "$0")/SHA256SUMS" ]; then from=$(dirname "$0"); fi
    fi
    version=$(run_python - "$from" "$files" "$(uname -s)" "$(uname -m)" <<'PYTHON'
import hashlib, os, re, shutil, sys, urllib.error, urllib.request

source, target, system, cpu = sys.argv[1:]


def stop(text):
    print(f"install.sh: {text}", file=sys.stderr)
    sys.exit(1)


def read(name):
    if "://" not in source:
        path = os.path.join(source, name)
        return open(path, "rb")
    return urllib.request.urlopen(f"{source.rstrip('/')}/{name}", timeout=60)


def take(name, digest):
    path = os.path.join(target, name)
    try:
        with read(name) as stream, open(path, "wb") as file:
            shutil.copyfileobj(stream, file, 1 << 20)
    except (OSError, urllib.error.URLError) as error:
        stop(f"cannot read {name} from {source}: {error}")
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if digest is not None and found != digest:
        stop(f"{name} from {source} is damaged: its SHA-256 is {found}, SHA256SUMS has {digest}")


try:
    with read("SHA256SUMS") as stream:
        lines = stream.read(1 << 20).decode().splitlines()
    sums = {name.lstrip("*"): digest for digest, name in (line.split() for line in lines)}
except (OSError, ValueError) as error:
    if "://" in source or not os.path.isdir(source):
        stop(f"no release at {source}: {error}")
    sums = dict.fromkeys(os.listdir(source))  # a folder of one's own wheels
ours = [name for name in sums if re.fullmatch(r"uma_(trio|protocol)-[\w.]+-py3-none-any\.whl", name)]
versions = [name.split("-")[1] for name in ours if name.startswith("uma_trio-")]
if len(versions) != 1 or len(ours) != 2:
    stop(f"{source} has not exactly one wheel each of uma-trio and uma-protocol")
own = [name for name in sums if re.fullmatch(r"llama_cpp_python-.*\.whl", name)]
ahead = [name for name in sums if re.fullmatch(r"uma_trio_llama-.*\.whl", name) and name.endswith(f"_{cpu}.whl")]
if own:
    extra, engine = "source", own[:1]
elif ahead and system == "Linux":
    extra, engine = "cpu", ahead[:1]
elif shutil.which("c++") or shutil.which("clang++"):
    extra, engine = "source", []
    print(f"No llama.cpp compiled ahead for {system} {cpu}: it is compiled now, which takes minutes.", file=sys.stderr)
else:
    stop(f"no llama.cpp compiled ahead for {system} {cpu}, and no C++ compiler to compile it")
for name in ours + engine:
    take(name, sums[name])
print(f"{extra} {versions[0]}")
PYTHON
    ) || exit 1
    extra=${version%% *} version=${version#* }
}

# Make the environment; the old one comes back if that fails.
install_environment() {
    mkdir -p "$prefix/share"
    rm -rf "$home.old"
    if [ -e "$home" ]; then mv "$home" "$home.old"; fi # an environment cannot be moved once it is made
    trap 'status=$?; rm -rf "$files"; if [ $status -ne 0 ]; then rm -rf "$home"; if [ -e "$home.old" ]; then mv "$home.old" "$home"; fi; fi' EXIT
    binary=''
    if [ "$extra" = cpu ]; then binary='--only-binary :all:'; fi
    wanted="uma-trio[$extra]==$version"
    # shellcheck disable=SC2086 # two words, or none
    if [ "$python" = uv ]; then
        uv venv --quiet --python '>=3.11' "$home"
        uv pip install --quiet --python "$home/bin/python" $binary --find-links "$files" "$wanted"
    else
        "$python" -m venv "$home"
        "$home/bin/python" -m pip --disable-pip-version-check install --quiet --no-compile $binary \
            --find-links "$files" "$wanted"
        "$home/bin/python" -m pip uninstall -qq --yes setuptools pip # 20 MB that nothing here uses again
    fi
    "$home/bin/uma-trio" --version >/dev/null
    rm -rf "$home.old"
    trap 'rm -rf "$files"' EXIT
}

link_programs() {
    mkdir -p "$prefix/bin"
    for name in $PROGRAMS; do
        ln -sf "$home/bin/$name" "$prefix/bin/$name"
    done
}

# The manual page and what shells complete, where they look below a prefix.
write_share() {
    mkdir -p "$prefix/share/${MANUAL%/*}"
    cp "$home/share/$MANUAL" "$prefix/share/$MANUAL"
    for shell in bash zsh fish; do
        case $shell in
            bash) place=$prefix/share/$BASH_COMPLETION ;;
            zsh) place=$prefix/share/$ZSH_COMPLETION ;;
            fish) place=$prefix/share/$FISH_COMPLETION ;;
        esac
        mkdir -p "${place%/*}"
        "$home/bin/uma-trio" completion "$shell" >"$place"
    done
}

uninstall() {
    for name in $PROGRAMS; do
        # A program of the same name that is not ours stays.
        if [ "$(readlink "$prefix/bin/$name" || true)" = "$home/bin/$name" ]; then rm "$prefix/bin/$name"; fi
    done
    rm -f "$prefix/share/$MANUAL" "$prefix/share/$BASH_COMPLETION" "$prefix/share/$ZSH_COMPLETION" \
        "$prefix/share/$FISH_COMPLETION"
    rm -rf "$home"
    echo "Removed. Settings (~/.config/uma-trio) and models are kept."
}

main "$@"
