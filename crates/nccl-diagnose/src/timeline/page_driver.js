// Runs the script of a page (the first argument) without a browser, moves a pointer over it and presses keys, and
// prints as JSON what it drew and showed. Only what the script uses is there.
"use strict";
const page = require("fs").readFileSync(process.argv[2], "utf8");
const between = (from, to) => { const at = page.indexOf(from) + from.length; return page.slice(at, page.indexOf(to, at)); };

const WIDTH = 1000, HEIGHT = 400;
let drawn = [];
const pen = new Proxy({ measureText: (text) => ({ width: text.length * 6 }) }, {
  get(own, name) {
    if (name in own) return own[name];
    return (...given) => {
      if (name === "clearRect") drawn = [];
      drawn.push({ name, given, fill: own.fillStyle, stroke: own.strokeStyle });
    };
  },
  set(own, name, value) { own[name] = value; return true; },
});
const element = (more) => {
  const heard = {};
  return {
    style: {}, dataset: {}, children: [], textContent: "", scrollTop: 0, clientWidth: WIDTH, clientHeight: HEIGHT, offsetWidth: 80, offsetHeight: 40,
    append(...all) { this.children.push(...all); }, addEventListener(name, does) { heard[name] = does; },
    getBoundingClientRect: () => ({ left: 0, top: 0 }), setPointerCapture() {},
    does(name, event) { let prevented = false; heard[name]({ preventDefault() { prevented = true; }, ...event }); return prevented; },
    ...more,
  };
};
const canvas = element({ getContext: () => pen });
const named = { data: element({ textContent: between("id=\"data\">", "</script>") }), view: element({ querySelector: () => canvas }) };
const document = {
  getElementById: (id) => (named[id] ??= element()), createElement: () => element(), querySelectorAll: () => [],
};
const script = between("<script>", "</script>");
new Function("document", "devicePixelRatio", "addEventListener", "innerWidth", "innerHeight", script)(document, 1, () => {}, WIDTH, HEIGHT);

const { view, tip } = named;
// What is filled where calls are, but for the ground of a label.
const bars = () => drawn.filter((one) => one.name === "fillRect" && one.given[0] >= 300 && /^#[0-9a-f]{6}$/.test(one.fill) && one.fill !== "#ffffff").map((one) => one.given);
const words = () => drawn.filter((one) => one.name === "fillText").map((one) => one.given[0]);
const lit = () => drawn.filter((one) => one.name === "strokeRect" && one.stroke === "#000").length;
const result = { words: words(), bars: bars(), tips: [], keys: {} };

const seen = new Map();
for (let y = 1; y < HEIGHT; y += 4) {
  for (let x = 1; x < WIDTH; x += 3) {
    view.does("pointermove", { clientX: x, clientY: y });
    if (tip.style.display === "block" && !seen.has(tip.textContent)) seen.set(tip.textContent, { text: tip.textContent, lit: lit(), x, y });
  }
}
result.tips = [...seen.values()];
view.does("pointermove", { clientX: WIDTH - 1, clientY: HEIGHT - 1 });
result.nothing = tip.style.display;
const over = result.tips[0];
view.does("pointermove", { clientX: over.x, clientY: over.y });
result.something = tip.style.display;
view.does("pointerleave", {});
result.left = tip.style.display;

for (const keys of ["w", "s", "a", "d", "w0", "wwad0", "x"]) {
  view.does("keydown", { key: "0" });
  const prevented = [...keys].map((key) => view.does("keydown", { key }));
  result.keys[keys] = { bars: bars(), prevented: prevented.every(Boolean) };
}
// The first button is "+".
named.bar.children[0].onclick();
result.plus = bars();
console.log(JSON.stringify(result));
