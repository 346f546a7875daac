//! Looks for damage in the write-ahead log of SQLite before it is opened. SQLite ends at the first frame that does not check
//! out, because a crash can leave an incomplete last transaction. So it drops all that follows, and says nothing.
//!
//! A frame has a checksum that continues the one of the frame before. Both are stored, so each frame can be checked by
//! itself. The format: <https://www.sqlite.org/fileformat2.html#the_write_ahead_log>.

use std::fmt;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

/// Bytes of the header of the log.
const HEADER: usize = 32;
/// Bytes of the header of a frame.
const FRAME: usize = 24;
/// The number at the beginning, with checksums over little-endian words.
const LITTLE_ENDIAN: u32 = 0x377F_0682;
/// The same with big-endian words.
const BIG_ENDIAN: u32 = 0x377F_0683;

/// What SQLite drops.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Damage {
    /// All that is in the log.
    Header,
    /// All from this frame on, with at most so many transactions.
    Frame { number: u64, transactions: u64 },
}

impl fmt::Display for Damage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Header => f.write_str("its header does not check out"),
            Self::Frame {
                number,
                transactions,
            } => write!(
                f,
                "frame {number} does not check out, and at most {transactions} transactions are lost with it"
            ),
        }
    }
}

/// Returns the damage of a log. `None` also for a log that cannot be read: SQLite then says why.
pub(super) fn damage(log: &Path) -> Option<Damage> {
    look(BufReader::new(File::open(log).ok()?))
}

fn look(mut log: impl Read) -> Option<Damage> {
    let mut header = [0; HEADER];
    // A shorter log has no transaction.
    log.read_exact(&mut header).ok()?;
    let (size, big_endian) = (word(&header, 8), word(&header, 0) == BIG_ENDIAN);
    let has_form = [LITTLE_ENDIAN, BIG_ENDIAN].contains(&word(&header, 0))
        && (512..=65536).contains(&size)
        && size.is_power_of_two();
    let mut before = sums(&header, 24);
    if !has_form || continued([0, 0], &header[..24], big_endian) != before {
        return Some(Damage::Header);
    }
    let mut frame = vec![0; FRAME + usize::try_from(size).ok()?];
    let (mut first_bad, mut is_damaged, mut transactions) = (None, false, 0);
    for number in 1.. {
        // An incomplete frame was never part of a transaction.
        if log.read_exact(&mut frame).is_err() {
            break;
        }
        // What is left of an earlier round of the log has other salts. It is behind all that is current.
        let is_current = frame[8..16] == header[16..24];
        let sum = continued(before, &frame[..8], big_endian);
        let sum = continued(sum, &frame[FRAME..], big_endian);
        before = sums(&frame, 16);
        if !is_current || sum != before {
            first_bad.get_or_insert(number);
        }
        if first_bad.is_some() && is_current {
            is_damaged = true;
            let is_commit = word(&frame, 4) != 0;
            transactions += u64::from(is_commit);
        }
    }
    let number = first_bad.filter(|_| is_damaged)?;
    Some(Damage::Frame {
        number,
        transactions,
    })
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn sums(bytes: &[u8], at: usize) -> [u32; 2] {
    [word(bytes, at), word(bytes, at + 4)]
}

/// Continues a checksum over a number of pairs of words.
fn continued([mut first, mut second]: [u32; 2], bytes: &[u8], big_endian: bool) -> [u32; 2] {
    for pair in bytes.chunks_exact(8) {
        let [a, b] = [word(pair, 0), word(pair, 4)]
            .map(|word| if big_endian { word } else { word.swap_bytes() });
        first = first.wrapping_add(a).wrapping_add(second);
        second = second.wrapping_add(b).wrapping_add(first);
    }
    [first, second]
}

#[cfg(test)]
mod tests {
    use std::fs;

    use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode};
    use sqlx::{ConnectOptions as _, SqliteConnection};

    use super::*;

    /// Bytes of a frame of SQLite's default pages.
    const WHOLE_FRAME: usize = FRAME + 4096;

    /// Returns the log of a real database with this many transactions.
    async fn log(transactions: usize) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a.db");
        let options = SqliteConnectOptions::new()
            .filename(&file)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal);
        let mut database: SqliteConnection = options.connect().await.unwrap();
        let mut run = async |sql: &'static str| {
            sqlx::query(sql).execute(&mut database).await.unwrap();
        };
        run("CREATE TABLE a (b)").await;
        // The rest of the log is from an earlier round.
        for _ in 0..20 {
            run("INSERT INTO a VALUES (zeroblob(9000))").await;
        }
        run("PRAGMA wal_checkpoint(RESTART)").await;
        for _ in 0..transactions {
            run("INSERT INTO a VALUES (1)").await;
        }
        fs::read(folder.path().join("a.db-wal")).unwrap()
    }

    #[tokio::test]
    async fn a_whole_log_and_an_incomplete_end_are_no_damage() {
        let whole = log(5).await;
        assert_eq!(look(&whole[..]), None);
        for length in [0, 20, HEADER, HEADER + 5, HEADER + WHOLE_FRAME + 100] {
            assert_eq!(look(&whole[..length]), None, "{length}");
        }
        assert_eq!(damage(Path::new("/missing/a.db-wal")), None);
    }

    #[tokio::test]
    async fn a_changed_byte_is_found_with_the_transactions_that_it_costs() {
        let whole = log(5).await;
        let changed = |at: usize| {
            let mut log = whole.clone();
            log[at] ^= 1;
            look(&log[..])
        };
        for at in [0, 9, 17, 24, 31] {
            assert_eq!(changed(at), Some(Damage::Header), "{at}");
        }
        // The second of five transactions, each of one frame: in its page and in its checksum.
        let second = HEADER + WHOLE_FRAME;
        let expected = Damage::Frame {
            number: 2,
            transactions: 4,
        };
        for at in [second + FRAME + 7, second + 17] {
            assert_eq!(changed(at), Some(expected), "{at}");
        }
        // Its salt: the frame itself looks like one of an earlier round.
        let expected = Damage::Frame {
            number: 2,
            transactions: 3,
        };
        assert_eq!(changed(second + 9), Some(expected));
        assert!(expected.to_string().contains("frame 2"), "{expected}");
    }
}
