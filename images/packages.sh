#!/bin/sh
# Installs Debian packages and the user of the programs in the images. Removes all files that depend on the time of the build.
set -eu

usage() {
    echo "usage: packages.sh install PACKAGE... | copy FOLDER PACKAGE... | extras LIST | user FOLDER SHELL" >&2
    exit 64
}

# Uses the packages of that day from Debian's archive.
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

# Installs packages and their dependencies, without recommended packages.
install_packages() {
    if [ -n "${DEBIAN_SNAPSHOT:-}" ]; then
        take_snapshot
    fi
    export DEBIAN_FRONTEND=noninteractive
    # As in the base, manuals are left out, and copyright files are kept.
    cat > /etc/dpkg/dpkg.cfg.d/mayfly <<'RULES'
path-exclude /usr/share/doc/*
path-include /usr/share/doc/*/copyright
path-exclude /usr/share/man/*
path-exclude /usr/share/info/*
path-exclude /usr/share/locale/*
path-exclude /usr/share/lintian/*
RULES
    # Java creates links for its manuals, so its installation fails without this folder.
    mkdir -p /usr/share/man/man1
    apt-get -q update
    apt-get -q install --yes --no-install-recommends "$@"
    rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/cache/ldconfig/aux-cache /var/cache/debconf/*-old \
        /usr/share/man/* /var/lib/dpkg/*-old /var/log/apt /var/log/*.log /etc/*- /etc/.pwd.lock /tmp/* /var/tmp/*
}

# Copies the files of installed packages to a folder, with the entries that scanners read in images without dpkg.
copy_packages() {
    root=$1
    shift
    mkdir -p "$root/var/lib/dpkg/status.d"
    # The copyright of a package may be in the package of its source.
    for package in "$@" $(dpkg-query --show --showformat '${Package}\n' 'gcc-*-base'); do
        dpkg-query --status "$package" > "$root/var/lib/dpkg/status.d/$package"
        dpkg-query --listfiles "$package"
    done | sort -u | while read -r path; do
        case $path in
        # Scripts need a shell, which is not in this image. The programs do not read these character sets.
        /usr/sbin/* | */gconv | */gconv/*) continue ;;
        esac
        # The package also lists the files that the rules above leave out.
        if [ -e "$path" ] || [ -L "$path" ]; then
            echo "${path#/}"
        fi
    done | tar -C / --no-recursion --files-from - -cf - | tar -C "$root" -xf -
    # These files are created when packages are configured, so no package lists them.
    mkdir -p "$root/etc/ssl/certs"
    cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
    cp /etc/nsswitch.conf "$root/etc/" 2>/dev/null || echo "hosts: files dns" > "$root/etc/nsswitch.conf"
    : > "$root/etc/group"
    echo "root:x:0:0:root:/root:/usr/sbin/nologin" > "$root/etc/passwd"
}

# The packages of the names in `EXTRAS`.
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

# Adds the user: ssh refuses a user without a name. The home folder belongs to group 0 for clusters that choose the user id.
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
