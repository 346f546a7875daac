//! Measures a store with 10,000 tasks and 500 instances: `cargo run --release -p pool-store --example load [URL]`.
//!
//! Without a URL, it uses a SQLite file in a temporary folder. With a URL, the database must be empty.

use std::time::{Duration, Instant};

use pool_protocol::id::{InstanceId, LeaseId, PoolName, TaskId};
use pool_protocol::instance::{InstanceHeartbeat, InstanceState, Registration};
use pool_protocol::lease::{End, Holder};
use pool_store::{
    Content, Ending, LeaseRequest, LeasedTask, Payload, PlatformState, Rules, Store, Submission,
};
use tokio::task::JoinSet;

type Failed = Box<dyn std::error::Error + Send + Sync>;

const TASKS: usize = 10_000;
const INSTANCES: usize = 500;
const ORGANIZATIONS: usize = 50;
const PAYLOAD: usize = 17_000;
/// The interval of the heartbeats of an instance.
const PERIOD: Duration = Duration::from_secs(10);
/// An instance runs one task in so many intervals. All instances together run 30,000 tasks an hour.
const ROUNDS: usize = 6;

#[tokio::main]
async fn main() -> Result<(), Failed> {
    let folder = tempfile::tempdir()?;
    let file = format!("sqlite:{}", folder.path().join("hub.db").display());
    let url = std::env::args().nth(1).unwrap_or(file);
    let store = Store::open(&url, Rules::default()).await?;
    let pool: PoolName = "bench".parse()?;

    let began = Instant::now();
    for number in 0..TASKS {
        submit(&store, &pool, number).await?;
    }
    let each = began.elapsed() / u32::try_from(TASKS)?;
    print(&format!(
        "{TASKS} tasks submitted and confirmed: {each:?} each"
    ));
    let mut instances = Vec::new();
    for number in 0..INSTANCES {
        instances.push(register(&store, &pool, number).await?);
    }
    memory("with all tasks queued")?;

    let mut all = JoinSet::new();
    for (number, &instance) in instances.iter().enumerate() {
        let (store, pool) = (store.clone(), pool.clone());
        all.spawn(async move {
            let phase = PERIOD * u32::try_from(number)? / u32::try_from(INSTANCES)?;
            let mut turn = tokio::time::interval_at(tokio::time::Instant::now() + phase, PERIOD);
            let mut times = Vec::new();
            for round in 0..ROUNDS {
                turn.tick().await;
                if round == number % ROUNDS {
                    let began = Instant::now();
                    let leased = lease(&store, &pool, instance, Duration::ZERO).await?;
                    times.push(began.elapsed());
                    run(&store, &leased.ok_or("no task")?).await?;
                }
                store.heartbeat(&pool, instance, &heartbeat()).await?;
            }
            Ok::<_, Failed>(times)
        });
    }
    print(&quantiles(
        "lease, 500 instances in turn",
        gather(all).await?,
    ));

    let mut all = JoinSet::new();
    for &instance in &instances {
        let (store, pool) = (store.clone(), pool.clone());
        all.spawn(async move {
            let began = Instant::now();
            let leased = lease(&store, &pool, instance, Duration::ZERO).await?;
            let took = began.elapsed();
            run(&store, &leased.ok_or("no task")?).await?;
            Ok::<_, Failed>(vec![took])
        });
    }
    print(&quantiles(
        "lease, 500 instances at once",
        gather(all).await?,
    ));

    // The remaining tasks are finished, so that all instances wait afterwards.
    while let Some(leased) = lease(&store, &pool, instances[0], Duration::ZERO).await? {
        run(&store, &leased).await?;
    }
    let mut all = JoinSet::new();
    for &instance in &instances {
        let (store, pool) = (store.clone(), pool.clone());
        all.spawn(async move {
            let wait = Duration::from_secs(50);
            let leased = lease(&store, &pool, instance, wait)
                .await?
                .ok_or("no task")?;
            let sent: u128 = leased.workspace.parse()?;
            Ok::<_, Failed>(vec![
                since_1970()?.saturating_sub(Duration::from_micros(u64::try_from(sent)?)),
            ])
        });
    }
    tokio::time::sleep(Duration::from_secs(3)).await;
    memory("with 500 that wait")?;
    for number in TASKS..TASKS + INSTANCES {
        submit(&store, &pool, number).await?;
    }
    print(&quantiles(
        "submission to lease, 500 wait",
        gather(all).await?,
    ));
    memory("at the end")?;
    store.close().await;
    Ok(())
}

async fn submit(store: &Store, pool: &PoolName, number: usize) -> Result<(), Failed> {
    let submission = Submission {
        task: TaskId::new(),
        pool: pool.clone(),
        organization: format!("organization-{}", number % ORGANIZATIONS),
        // The time of the submission.
        workspace: since_1970()?.as_micros().to_string(),
        job: number.to_string(),
        step: "plan".to_owned(),
        kind: "terraformPlan".to_owned(),
        traceparent: None,
        stock: false,
        content: Content::Payload(Payload {
            key_id: None,
            data: vec![b'x'; PAYLOAD],
        }),
    };
    let task = store.submit(submission).await?.task();
    store
        .apply_platform_state(task, PlatformState::Waiting)
        .await?;
    Ok(())
}

async fn register(store: &Store, pool: &PoolName, number: usize) -> Result<InstanceId, Failed> {
    let registration = Registration {
        system_id: number.to_string(),
        name: format!("agent-{number}").parse()?,
        executor_version: "0.1.0".to_owned(),
        protocol_min_version: 1,
        protocol_max_version: 1,
        platform: "linux".to_owned(),
        architecture: "amd64".to_owned(),
        capacity: 25,
        tags: Vec::new(),
        installation: String::new(),
        target: "kubernetes".to_owned(),
        leases: Vec::new(),
    };
    Ok(store.register(pool, &registration).await?.instance)
}

async fn lease(
    store: &Store,
    pool: &PoolName,
    instance: InstanceId,
    wait: Duration,
) -> Result<Option<LeasedTask>, Failed> {
    let request = LeaseRequest {
        pool: pool.clone(),
        instance,
        holding: Vec::<LeaseId>::new(),
        wait,
    };
    Ok(store.lease(&request).await?)
}

async fn run(store: &Store, leased: &LeasedTask) -> Result<(), Failed> {
    let holder = Holder {
        uid: leased.grant.lease.to_string(),
        name: "pod".to_owned(),
    };
    store.accept(leased.grant, &holder).await?;
    let end = End {
        exit_code: Some(0),
        final_log_sequence: None,
        diagnostic: String::new(),
        verdict: None,
        reported: true,
    };
    store.end(leased.grant, Ending::Completed, &end).await?;
    Ok(())
}

fn heartbeat() -> InstanceHeartbeat {
    InstanceHeartbeat {
        state: InstanceState::Online,
        available_capacity: 25,
        leases: Vec::new(),
    }
}

fn since_1970() -> Result<Duration, Failed> {
    Ok(std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?)
}

async fn gather(all: JoinSet<Result<Vec<Duration>, Failed>>) -> Result<Vec<Duration>, Failed> {
    let mut times = Vec::new();
    for part in all.join_all().await {
        times.extend(part?);
    }
    Ok(times)
}

fn quantiles(what: &str, mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    let at = |percent: usize| times.get(times.len() * percent / 100);
    let milliseconds =
        |time: Option<&Duration>| time.map_or(0.0, |time| time.as_secs_f64() * 1000.0);
    format!(
        "{what}: p50 {:.1} ms, p99 {:.1} ms, longest {:.1} ms of {}",
        milliseconds(at(50)),
        milliseconds(at(99)),
        milliseconds(times.last()),
        times.len()
    )
}

/// Prints the memory of this process, as the kernel reports it.
fn memory(when: &str) -> Result<(), Failed> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let wanted = |line: &&str| line.starts_with("VmRSS") || line.starts_with("VmHWM");
    let lines: Vec<_> = status.lines().filter(wanted).collect();
    let shown = lines.join(", ").replace(['\t', ' '], "");
    print(&format!("memory {when}: {shown}"));
    Ok(())
}

#[expect(clippy::print_stdout, reason = "this is what it is for")]
fn print(line: &str) {
    println!("{line}");
}
