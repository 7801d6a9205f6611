// The microphone as a WAV file: the browser's own recording, decoded and written as 16-bit samples of one channel,
// which every route of sound takes.

const RATE = 16000;

export class Recording {
  async start() {
    this.stream = await navigator.mediaDevices.getUserMedia({audio: true});
    try {
      this.recorder = new MediaRecorder(this.stream);
      this.pieces = [];
      this.recorder.ondataavailable = event => this.pieces.push(event.data);
      this.stopped = new Promise(done => { this.recorder.onstop = done; });  // also when the microphone is pulled out
      this.recorder.start();
    } catch (error) { this.release(); throw error; }
  }

  // The microphone is let go of.
  release() { for (const track of this.stream.getTracks()) track.stop(); }

  // The file; its microphone is let go of.
  async stop() {
    if (this.recorder.state !== "inactive") this.recorder.stop();
    await this.stopped;
    this.release();
    const context = new OfflineAudioContext(1, 1, RATE);
    const sound = await context.decodeAudioData(await new Blob(this.pieces).arrayBuffer());
    return wav(mixed(sound), sound.sampleRate);
  }
}

function mixed(sound) {
  const samples = new Float32Array(sound.length);
  for (let channel = 0; channel < sound.numberOfChannels; channel++) {
    const own = sound.getChannelData(channel);
    for (let i = 0; i < samples.length; i++) samples[i] += own[i] / sound.numberOfChannels;
  }
  return samples;
}

export function wav(samples, rate) {
  const view = new DataView(new ArrayBuffer(44 + samples.length * 2));
  const text = (at, word) => { for (let i = 0; i < word.length; i++) view.setUint8(at + i, word.charCodeAt(i)); };
  text(0, "RIFF"); view.setUint32(4, 36 + samples.length * 2, true); text(8, "WAVEfmt ");
  view.setUint32(16, 16, true); view.setUint16(20, 1, true); view.setUint16(22, 1, true); view.setUint32(24, rate, true);
  view.setUint32(28, rate * 2, true); view.setUint16(32, 2, true); view.setUint16(34, 16, true);
  text(36, "data"); view.setUint32(40, samples.length * 2, true);
  samples.forEach((sample, i) => view.setInt16(44 + i * 2, Math.max(-1, Math.min(1, sample)) * 32767, true));
  return new Blob([view], {type: "audio/wav"});
}

export const base64 = blob => new Promise((done, failed) => {
  const reader = new FileReader();
  reader.onload = () => done(reader.result.slice(reader.result.indexOf(",") + 1));
  reader.onerror = () => failed(reader.error);
  reader.readAsDataURL(blob);
});
