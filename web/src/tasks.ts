// Tasks beside the file, where the server offers them.

export class Tasks {
  async look(): Promise<void> { /* see whether the server has tasks */ }
}
