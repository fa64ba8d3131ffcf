// node chat.js PROJECT SESSION "a message" [STOP_AFTER]
//
// Sends a message, and prints one JSON object a line for each item until its turn has ended, then the transcript. With
// STOP_AFTER the turn is stopped after so many frames. Where the services are is told by HEARTH_POOL_ADDRESS and
// HEARTH_RELAY_ADDRESS, a token by HEARTH_TOKEN.
import { Client, Transcript, isEnding } from "./hearth.js";

const [project, session, text, stopAfter] = process.argv.slice(2);
const say = (content) => process.stdout.write(`${JSON.stringify(content)}\n`);
const client = new Client({
  pool: process.env.HEARTH_POOL_ADDRESS,
  relay: process.env.HEARTH_RELAY_ADDRESS,
  token: process.env.HEARTH_TOKEN,
});
const key = { project, session };
const sent = await client.send(key, text);
const execution = sent.started.execution.execution_id;
say({ sent: execution });
const transcript = new Transcript();
let frames = 0;
for await (const item of client.watch(key)) {
  transcript.apply(item);
  if (item.item === "event") say({ event: item.event.event.type, sequence: Number(item.event.cursor.sequence) });
  else if (item.item === "reset") say({ reset: true });
  else if (item.item === "frame") {
    frames += 1;
    if (frames === 1) say({ first_frame: true });
    if (frames === Number(stopAfter)) say({ stop: (await client.stop(key, execution)).command.command_id });
  }
  const event = item.event?.event;
  if (event && isEnding(event.type) && event.execution_id === execution) break;
}
say({ outcome: transcript.outcome, entries: [...transcript.entries.values()] });
client.close();
