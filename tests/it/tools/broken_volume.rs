//! A store on a network volume that hangs, breaks or is emptied while a run copies from it: the run goes on without it. The volume is
//! SFTP, and the test passes on what its server answers.

use std::fs::{self, File};
use std::io::{self, Read as _};
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use integration_tests::machine::RunningExecutor;
use integration_tests::{Machine, job};
use job_contract::{Tool, env};
use nix::errno::Errno;
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use test_peers::gate::Gate;
use test_peers::process::{Running, Stream};
use test_peers::providers::{NAMESPACE, PROVIDERS};
use test_peers::skips::needed;
use test_peers::wait;

use super::provider_store::{Locked, provided, says};

with_both_tools! {
    a_run_goes_on_without_a_volume_that_hangs_breaks_or_is_emptied,
}

const HANGS: &str = "The volume of the provider store hangs.";
/// The folder of a store.
const PACKAGES: &str = "providers";
const TAKEN_AWAY: &str = "taken-away";
const FUSE: &str = "/dev/fuse";
const SFTP_SERVER: &str = "/usr/lib/openssh/sftp-server";
/// Of what the server answers. More than the names of all files, and less than one of the archives.
const MIDWAY: u64 = 400_000;
/// A run whose volume hangs goes on earlier. If it does not, the test fails instead of hanging too.
const LONGEST_PAUSE: Duration = Duration::from_mins(5);

/// A folder that is mounted over a network.
struct NetworkVolume {
    mount: PathBuf,
    _client: Running,
}

impl NetworkVolume {
    /// `midway`: what happens while the first archives are read. The connection ends after an error.
    fn mount(
        machine: &Machine,
        name: &str,
        folder: &Path,
        midway: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> Self {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        thread::spawn(move || {
            // The client says what it lacks.
            let _ = serve(&server, midway);
        });
        let mount = machine.scratch(name);
        fs::create_dir(&mount).unwrap();
        let before = fs::metadata(&mount).unwrap().dev();
        let client = Running::start(
            Command::new("sshfs")
                .arg(format!("127.0.0.1:{}", folder.display()))
                .arg(&mount)
                .args(["-f", "-o", "dir_cache=no,direct_io"])
                .args(["-o", &format!("directport={port}")]),
        );
        wait::until_blocking("the volume is mounted", || {
            let is_mounted = fs::metadata(&mount).is_ok_and(|found| found.dev() != before);
            is_mounted
                .then_some(())
                .ok_or_else(|| client.text(Stream::Stderr))
        });
        Self {
            mount,
            _client: client,
        }
    }
}

impl Drop for NetworkVolume {
    fn drop(&mut self) {
        // The folder can be removed then. A client that has lost its server has unmounted it already.
        let mut unmounting = Command::new("fusermount3");
        let _ = unmounting.arg("-uzq").arg(&self.mount).status();
    }
}

/// Serves one client.
fn serve(server: &TcpListener, midway: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
    let mut client = server.accept()?.0;
    let requests = OwnedFd::from(client.try_clone()?);
    let mut serving = Command::new(SFTP_SERVER)
        .stdin(requests)
        .stdout(Stdio::piped())
        .spawn()?;
    let mut answers = serving.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
    let passed_on = io::copy(&mut (&mut answers).take(MIDWAY), &mut client)
        .and_then(|_| midway())
        .and_then(|()| io::copy(&mut answers, &mut client));
    serving.kill()?;
    serving.wait()?;
    passed_on.map(drop)
}

/// Whether volumes can be mounted here. The file of the kernel's device is missing where nothing has made it.
fn fuse() -> Result<File, String> {
    let open = || File::options().read(true).write(true).open(FUSE);
    let opened = open().or_else(|error| {
        if error.kind() != io::ErrorKind::NotFound {
            return Err(error);
        }
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        match mknod(FUSE, SFlag::S_IFCHR, mode, makedev(10, 229)) {
            // Another test has made it.
            Ok(()) | Err(Errno::EEXIST) => open(),
            Err(error) => Err(error.into()),
        }
    });
    opened.map_err(|error| format!("a network volume needs `{FUSE}`: {error}"))
}

fn a_run_goes_on_without_a_volume_that_hangs_breaks_or_is_emptied(tool: Tool) {
    // More than a run needs on a busy machine.
    const LONG: &str = "60";
    or_skip!(needed(fuse()));
    let it = or_skip!(Locked::new(tool));
    let all = PROVIDERS.len();
    let exported = it.machine.scratch("exported");
    let filling = it.plan("2", Some(&it.lock), &it.kept("2"), &[]);
    let filled = filling.env(env::PROVIDER_CACHE_DIR, &exported).run();
    says(&filled.expect_code(0), 0, all);
    // A run with this limit for the volume, and the point behind its `init`.
    let start = |job_id: &str, volume: &NetworkVolume, limit: &str| {
        let gate = Gate::new(it.machine.scratch(&format!("gate-{job_id}")));
        let scripts = vec![job::before(job::bash(1, &gate.words()))];
        let run = it.plan_with(job_id, Some(&it.lock), &it.kept(job_id), &[], scripts);
        let run = run.env(env::PROVIDER_CACHE_DIR, &volume.mount);
        (run.env(env::CACHE_TIMEOUT_SECONDS, limit).start(), gate)
    };
    let ends = |job_id: &str, run: RunningExecutor| {
        let outcome = run.wait().expect_code(0);
        assert_eq!(it.lock_after(job_id), it.lock);
        outcome
    };

    // What was copied is the run's own.
    let volume = NetworkVolume::mount(&it.machine, "emptied-later", &exported, || Ok(()));
    let (run, gate) = start("3", &volume, LONG);
    let after_init = gate.reached();
    empty(&exported).unwrap();
    drop(after_init);
    says(&ends("3", run), all, 0);
    drop(volume);
    restore(&exported).unwrap();

    let (resume, paused) = mpsc::channel::<()>();
    let volume = NetworkVolume::mount(&it.machine, "hangs", &exported, move || {
        match paused.recv_timeout(LONGEST_PAUSE) {
            Err(RecvTimeoutError::Timeout) => Err(io::ErrorKind::TimedOut.into()),
            _ => Ok(()),
        }
    });
    let downloads = it.registry.downloads();
    let (run, gate) = start("4", &volume, "2");
    let after_init = gate.reached();
    drop(resume);
    drop(after_init);
    let outcome = ends("4", run);
    assert!(outcome.log().contains(HANGS), "{outcome}");
    // By the executor or by the tool.
    assert_eq!(it.registry.downloads(), downloads + all, "{outcome}");
    drop(volume);

    let emptied = exported.clone();
    let volume = NetworkVolume::mount(&it.machine, "emptied", &exported, move || empty(&emptied));
    let (run, gate) = start("5", &volume, LONG);
    gate.open_blocking();
    let outcome = ends("5", run);
    // Some are on their way already.
    let mut lines = (0..all).map(|stored| provided(stored, all - stored));
    assert!(lines.any(|line| outcome.log().contains(&line)), "{outcome}");
    drop(volume);
    restore(&exported).unwrap();

    let volume = NetworkVolume::mount(&it.machine, "breaks", &exported, || {
        Err(io::ErrorKind::ConnectionReset.into())
    });
    let (run, gate) = start("6", &volume, LONG);
    gate.open_blocking();
    says(&ends("6", run), 0, all);
    drop(volume);

    // Nothing is left that has the packages.
    it.registry.lose_archives();
    let volume = NetworkVolume::mount(&it.machine, "breaks-too", &exported, || {
        Err(io::ErrorKind::ConnectionReset.into())
    });
    let (run, _gate) = start("7", &volume, LONG);
    let failed = run.wait().expect_code(1);
    let host = it.registry.host();
    for (name, version) in PROVIDERS {
        let line = format!("Error while installing {host}/{NAMESPACE}/{name} v{version}");
        assert!(failed.log().contains(&line), "{failed}");
    }
}

/// Takes all packages away, as another client does.
fn empty(store: &Path) -> io::Result<()> {
    fs::rename(store.join(PACKAGES), store.join(TAKEN_AWAY))
}

fn restore(store: &Path) -> io::Result<()> {
    let packages = store.join(PACKAGES);
    // Those that a run has published meanwhile.
    if packages.exists() {
        fs::remove_dir_all(&packages)?;
    }
    fs::rename(store.join(TAKEN_AWAY), packages)
}
