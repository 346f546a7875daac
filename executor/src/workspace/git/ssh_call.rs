//! Reads how git calls ssh: `[-o …] [-p port] [user@]host "git-upload-pack '/path'"`. It runs nothing.

/// The address that ssh is called for, by its arguments, each with a NUL at its end.
pub(super) fn address(arguments: &str) -> Result<String, &'static str> {
    let arguments: Vec<&str> = arguments
        .strip_suffix('\0')
        .unwrap_or(arguments)
        .split('\0')
        .collect();
    let [options @ .., target, command] = arguments.as_slice() else {
        return Err("git called ssh without a host or a command");
    };
    let path = path(command).ok_or("git may only fetch over ssh, by `git-upload-pack`")?;
    let port = options
        .windows(2)
        .rev()
        .find_map(|pair| (pair[0] == "-p").then_some(pair[1]));
    let (user, host) = match target.rsplit_once('@') {
        Some((user, host)) => (format!("{user}@"), host),
        None => (String::new(), *target),
    };
    // git takes the brackets off.
    let host = if host.contains(':') && !host.starts_with('[') {
        format!("[{host}]")
    } else {
        host.to_owned()
    };
    if port.is_none() && !path.starts_with('/') {
        return Ok(format!("{user}{host}:{path}"));
    }
    let port = port.map(|port| format!(":{port}")).unwrap_or_default();
    let slash = if path.starts_with('/') { "" } else { "/" };
    Ok(format!("ssh://{user}{host}{port}{slash}{path}"))
}

/// The path in the command for the server, which git quotes for a shell.
fn path(command: &str) -> Option<String> {
    let quoted = command.strip_prefix("git-upload-pack ")?;
    let inner = quoted.strip_prefix('\'')?.strip_suffix('\'')?;
    let path = inner.replace(r"'\''", "\u{0}").replace(r"'\!'", "!");
    (!path.contains('\'')).then(|| path.replace('\u{0}', "'"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case(&["git@h", "git-upload-pack '/a/b.git'"], "ssh://git@h/a/b.git")]
    #[case(&["git@h", "git-upload-pack 'a/b.git'"], "git@h:a/b.git")]
    #[case(&["-i", "k", "-o", "SendEnv=GIT_PROTOCOL", "-p", "7999", "h", "git-upload-pack '/a'"], "ssh://h:7999/a")]
    #[case(&["-p", "22", "git@::1", "git-upload-pack 'a'"], "ssh://git@[::1]:22/a")]
    #[case(&["h", r"git-upload-pack 'it'\''s'\!''"], "h:it's!")]
    fn the_address_is_read_from_the_arguments(#[case] arguments: &[&str], #[case] expected: &str) {
        let text = arguments.join("\0") + "\0";
        assert_eq!(address(&text).unwrap(), expected);
    }

    #[rstest]
    #[case(&["git@h", "git-receive-pack '/a'"])]
    #[case(&["git@h", "git-upload-pack /a"])]
    #[case(&["git@h", "git-upload-pack '/a'; rm '/b'"])]
    #[case(&["git@h"])]
    fn anything_else_than_a_fetch_is_refused(#[case] arguments: &[&str]) {
        let text = arguments.join("\0") + "\0";
        assert!(address(&text).is_err());
    }
}
