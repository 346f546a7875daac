// `--require` of a server: its process ends when its input ends, also if whoever started it was killed.
process.stdin.on("end", () => process.exit()).resume();
