#!/bin/sh
# Puts Debian packages, and the user the programs run as, into the images. Leaves nothing behind that tells when it ran.
set -eu

usage() {
    echo "usage: packages.sh install PACKAGE... | copy FOLDER PACKAGE... | extras LIST | user FOLDER SHELL" >&2
    exit 64
}

# Packages as they were on that day, from Debian's own archive.
take_snapshot() {
    . /etc/os-release
    archive=http://snapshot.debian.org/archive
    rm -f /etc/apt/sources.list /etc/apt/sources.list.d/*
    for suite in "debian/$DEBIAN_SNAPSHOT $VERSION_CODENAME" \
        "debian/$DEBIAN_SNAPSHOT $VERSION_CODENAME-updates" \
        "debian-security/$DEBIAN_SNAPSHOT $VERSION_CODENAME-security"; do
        echo "deb [check-valid-until=no] $archive/$suite main"
    done > /etc/apt/sources.list
}

# Installs packages and what they depend on, nothing they merely recommend.
install_packages() {
    if [ -n "${DEBIAN_SNAPSHOT:-}" ]; then
        take_snapshot
    fi
    export DEBIAN_FRONTEND=noninteractive
    # Manuals stay out as they do in the base; copyright files stay.
    cat > /etc/dpkg/dpkg.cfg.d/mayfly <<'RULES'
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/man/*
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
path-exclude /usr/share/lintian/*
RULES
    # Java links to manuals of its own, and cannot be installed where there is no folder for the links.
    mkdir -p /usr/share/man/man1
    apt-get -q update
    apt-get -q install --yes --no-install-recommends "$@"
    rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/aux-cache /var/cache/debconf/*-old \
        /usr/share/man/* /var/lib/dpkg/*-old /var/log/apt /var/log/*.log /etc/*- /etc/.pwd.lock /tmp/* /var/tmp/*
}

# Copies the files of installed packages into a folder, with the entries scanners look for where there is no dpkg.
copy_packages() {
    root=$1
    shift
    mkdir -p "$root/var/lib/dpkg/status.d"
    # The copyright of a package may lie with the one it was built from.
    for package in "$@" $(dpkg-query --show --showformat '${Package}\n' 'gcc-*-base'); do
        dpkg-query --status "$package" > "$root/var/lib/dpkg/status.d/$package"
        dpkg-query --listfiles "$package"
    done | sort -u | while read -r path; do
        case $path in
        # Scripts, which have no shell here, and character sets the programs do not read.
        /usr/sbin/* | */gconv | */gconv/*) continue ;;
        esac
        # What the rules above left out is listed all the same.
        if [ -e "$path" ] || [ -L "$path" ]; then
            echo "${path#/}"
        fi
    done | tar -C / --no-recursion --files-from - -cf - | tar -C "$root" -xf -
    # Made when packages are configured, and part of none.
    mkdir -p "$root/etc/ssl/certs"
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    cp /etc/nsswitch.conf "$root/etc/" 2>/dev/null || echo "hosts: files dns" > "$root/etc/nsswitch.conf"
    : > "$root/etc/group"
    echo "root:x:0:0:root:/root:/usr/sbin/nologin" > "$root/etc/passwd"
}

# The packages behind the names `EXTRAS` may hold.
extra_packages() {
    for name in $(echo "$1" | tr ',' ' '); do
        case $name in
        groovy) echo groovy default-jre-headless ;;
        aws-cli) echo awscli ;;
        azure-cli) echo azure-cli ;;
        *)
            echo "EXTRAS knows groovy, aws-cli and azure-cli, not \`$name\`" >&2
            exit 64
            ;;
        esac
    done
}

# ssh refuses a user without a name. The home belongs to group 0 for clusters that choose the user's number.
add_user() {
    echo "mayfly:x:1000:1000:Mayfly:/home/mayfly:$2" >> "$1/etc/passwd"
    echo "mayfly:x:1000:" >> "$1/etc/group"
    mkdir -p "$1/home/mayfly" "$1/tmp"
    chmod 1777 "$1/tmp"
    chown 1000:0 "$1/home/mayfly"
    chmod 0770 "$1/home/mayfly"
}

action=${1:-}
[ $# -gt 0 ] && shift
case $action in
install) install_packages "$@" ;;
copy) copy_packages "$@" ;;
extras) extra_packages "${1:-}" ;;
user) add_user "$@" ;;
*) usage ;;
esac
