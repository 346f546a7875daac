// Shows every value in the ways of JavaScript. Values come in a file, each with a zero byte behind it.
const { inspect } = require('node:util');
const querystring = require('node:querystring');
const address = (make) => (value) => {
  try {
    return make(value);
  } catch (error) {
    return inspect(error) + error.message + error.input;
  }
};
const plain = {
  json: (v) => JSON.stringify(v),
  'json, twice': (v) => JSON.stringify(JSON.stringify({ a: v })),
  'json, indented': (v) => JSON.stringify({ [v]: [v] }, null, 2),
  inspect: (v) => inspect(v),
  'inspect of an object': (v) => inspect({ a: v, [v]: [v] }),
  'inspect of an error': (v) => inspect(new Error(v)),
  'json of inspect': (v) => JSON.stringify(inspect(v)),
  'inspect of json': (v) => inspect(JSON.stringify(v)),
  encodeURIComponent,
  encodeURI,
  escape,
  'encodeURIComponent, twice': (v) => encodeURIComponent(encodeURIComponent(v)),
  'a form': (v) => new URLSearchParams({ a: v }).toString(),
  querystring: (v) => querystring.stringify({ a: v }),
  'a password': address((v) => {
    const url = new URL('https://h.example.test');
    url.password = v;
    return url.href;
  }),
  'a path': address((v) => new URL(`https://h.example.test/a/${v}/b`).href),
  'a query': address((v) => new URL(`https://h.example.test/?a=${v}`).href),
  'a fragment': address((v) => new URL(`https://h.example.test/#${v}`).href),
  'an address that is none': address((v) => new URL(`ht tp://${v}`).href),
};
const encoded = { base64: (v) => Buffer.from(v).toString('base64'), base64url: (v) => Buffer.from(v).toString('base64url') };
const values = require('node:fs').readFileSync(process.argv[2], 'utf8').split('\0').slice(0, -1);
const out = [];
values.forEach((value, at) => {
  for (const [name, show] of Object.entries(plain)) out.push(`${name}\x1f${at}\x1f${show(value)}\x1e`);
  for (const [name, show] of Object.entries(encoded)) out.push(`!${name}\x1f${at}\x1f${show(value)}\x1e`);
});
require('node:fs').writeSync(1, out.join(''));
