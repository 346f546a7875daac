//! A process that a script has left in the background: it asks for the operator's login and looks for it while `init` has it.

use std::fs;
use std::sync::Once;

use integration_tests::job::{bash, before, before_init};
use integration_tests::{Repository, Search, TestSecret, job};
use job_contract::{JobData, env};
use test_peers::gate::Gate;
use test_peers::git_http::{self, GitHttpOptions};
use test_peers::http::Server;
use test_peers::repository::git;

use super::call;
use crate::machine;

/// As in pods, where root could see everything.
const USER: u32 = 65534;

#[test]
fn a_process_that_a_script_left_gets_no_login_of_the_operator() {
    assert!(
        nix::unistd::geteuid().is_root(),
        "run this test as root, which may become another user"
    );
    let (machine, folder) = (machine(), tempfile::tempdir().unwrap());
    let login = TestSecret::word("login");
    let options = GitHttpOptions {
        credentials: Some(format!("oauth2:{}", login.value)),
        ..GitHttpOptions::default()
    };
    let [go, done] = ["go", "done"].map(|name| Gate::new(machine.scratch(name)));
    let [go_path, done_path] = [&go, &done].map(|gate| gate.path().display().to_string());
    let (repositories, tried) = (folder.path().to_path_buf(), Once::new());
    let server = Server::start(move |request| {
        // The tool's git waits for its answer, and has shown the login, until the process has tried.
        let has_login = request.header("authorization").is_some();
        if has_login && request.path.starts_with("/module.git/") {
            tried.call_once(|| {
                go.open_blocking();
                done.open_blocking();
            });
        }
        git_http::answer(&repositories, &options, request)
    })
    .unwrap();
    let url = server.url();
    let source = Repository::module(&call(&format!("{url}/module.git")));
    for (name, repository) in [
        ("source", &source),
        ("module", &Repository::module("locals { inner = true }\n")),
    ] {
        let from = repository.path().display().to_string();
        let to = format!("{name}.git");
        git(folder.path(), &["clone", "--quiet", "--bare", &from, &to]);
    }

    let [work, seen, sockets, spy] =
        ["work", "seen", "sockets", "spy"].map(|name| machine.scratch(name));
    // The group of a script is killed at its end. So it waits until the process has left the group.
    let escaped = Gate::new(machine.scratch("escaped"));
    let escaped = escaped.path().display();
    let ask = format!(
        "ask() {{ printf 'protocol=http\\nhost={}\\npath=module.git\\n\\n' | git credential-cache --socket \"$1\" get; }}",
        server.host()
    );
    let [work, seen_path, sockets_path] =
        [&work, &seen, &sockets].map(|path| path.display().to_string());
    let text = format!(
        "{ask}\necho escaped > '{escaped}'\ncat '{go_path}' > /dev/null\n\
         find '{work}' -type s > '{sockets_path}'\n\
         {{ while read -r socket; do ask \"$socket\"; done < '{sockets_path}'\n\
         cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ\n\
         find '{work}' -type f -exec cat {{}} +\n\
         echo all-seen; }} > '{seen_path}' 2> /dev/null\n\
         cat '{done_path}' > /dev/null\n"
    );
    fs::write(&spy, text).unwrap();
    let leave = format!(
        "setsid bash '{}' > /dev/null 2>&1 < /dev/null & cat '{escaped}'",
        spy.display()
    );
    let after_init = format!(
        "{ask}\necho \"answer: <$(ask \"$(head -n1 '{sockets_path}')\" 2> /dev/null)>\"\n\
         echo \"sockets: <$(find '{work}' -type s)>\"\n\
         echo \"settings: <$(env | grep -c credential)>\""
    );
    let plan = JobData {
        source: Some(format!("{url}/source.git")),
        command_list: vec![before_init(bash(1, &leave)), before(bash(1, &after_init))],
        ..job::plan(&source)
    };
    machine.queue(&[&plan]);
    let variable = format!("{}HERE", env::GIT_LOGIN_PREFIX);
    let list = serde_json::json!([{ "url": url, "kind": "gitlab", "variable": variable }]);
    let outcome = machine
        .executor(&plan)
        .env(env::GIT_LOGINS, list.to_string())
        .env(&variable, &login.value)
        .as_user(USER)
        .run()
        .expect_code(0);
    // It has found the socket, and has seen processes and files.
    let found = fs::read_to_string(&sockets).unwrap();
    assert_eq!(found.lines().count(), 1, "{found}");
    let seen = fs::read(&seen).unwrap();
    let text = String::from_utf8_lossy(&seen);
    assert!(
        text.contains("git-remote-http") && text.contains("all-seen"),
        "{outcome}"
    );
    assert!(text.contains("credential-cache --socket"));
    let leaks = Search::of([&login]).find(&seen);
    assert!(leaks.is_empty(), "{leaks:?}");
    for line in ["answer: <>", "sockets: <>", "settings: <0>"] {
        assert!(outcome.log().contains(line), "{line}\n{outcome}");
    }
    assert!(!outcome.to_string().contains(&login.value));
}
