//! The commands about runs in a cluster: `launch`, `list`, `logs`, `explain`, `cancel`, `check`. What they ask of the
//! cluster is the cluster room's business; here are the words of the user, and how answers are shown.

mod cancel;
mod check;
mod connection;
mod explain;
mod launch;
mod list;
mod logs;
mod output;
mod problem;
mod select;
mod timeline;

use job_contract::Exit;

pub use self::cancel::CancelArgs;
pub use self::check::CheckArgs;
pub use self::connection::{AccessArgs, ClusterArgs};
pub use self::explain::ExplainArgs;
pub use self::launch::LaunchArgs;
pub use self::list::ListArgs;
pub use self::logs::LogsArgs;
pub use self::output::ShowArgs;

use self::output::Output;
use self::problem::CommandError;

/// `api-launcher launch`.
pub fn launch(args: &LaunchArgs) -> Exit {
    carry_out(&args.show, async |out| launch::launch(args, out).await)
}

/// `api-launcher list`.
pub fn list(args: &ListArgs) -> Exit {
    carry_out(&args.show, async |out| {
        list::list(&args.cluster.connect().await?, out).await
    })
}

/// `api-launcher logs`.
pub fn logs(args: &LogsArgs) -> Exit {
    carry_out(&args.show, async |out| {
        logs::logs(args, &args.cluster.connect().await?, out).await
    })
}

/// `api-launcher explain`.
pub fn explain(args: &ExplainArgs) -> Exit {
    carry_out(&args.show, async |out| {
        explain::explain(&args.run, &args.cluster.connect().await?, out).await
    })
}

/// `api-launcher cancel`.
pub fn cancel(args: &CancelArgs) -> Exit {
    carry_out(&args.show, async |out| {
        cancel::cancel(args, &args.cluster.connect().await?, out).await
    })
}

/// `api-launcher check`.
pub fn check(args: &CheckArgs) -> Exit {
    carry_out(&args.show, async |out| check::check(args, out).await)
}

fn carry_out(
    show: &ShowArgs,
    command: impl AsyncFnOnce(&mut Output) -> Result<Exit, CommandError>,
) -> Exit {
    // Somebody else having installed it before is as good.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut out = Output::new(show);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build();
    let end = match runtime {
        Ok(runtime) => runtime.block_on(command(&mut out)),
        Err(source) => Err(CommandError::Runtime(source)),
    };
    match end {
        // Whoever wanted less than all of it is not failed for it.
        Ok(exit) => exit,
        Err(error) => {
            out.fail(&error);
            error.exit()
        }
    }
}
