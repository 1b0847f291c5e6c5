-- Commands only: nothing else is loaded until one of them, or require('keystroke').setup(), is called.
if vim.g.loaded_keystroke then
  return
end
vim.g.loaded_keystroke = true

local function command(name, does, options)
  vim.api.nvim_create_user_command(name, function(given)
    does(require('keystroke'), given)
  end, options)
end

command('KeystrokeEdit', function(keystroke, given)
  keystroke.edit(given.args, given.range > 0 and { given.line1, given.line2 } or nil)
end, { nargs = '*', range = true, desc = 'Edit the range, or the file, by an instruction' })
command('KeystrokeTask', function(keystroke, given)
  keystroke.task(given.args)
end, { nargs = '*', desc = 'Give the agent a task in this folder' })
command('KeystrokeTasks', function(keystroke)
  keystroke.tasks()
end, { desc = 'The tasks of this folder: their changes to be taken, rejected, undone' })
command('KeystrokeNextEdit', function(keystroke)
  keystroke.next_edit()
end, { desc = 'Go to the next edit; there, make it' })
command('KeystrokeToggle', function(keystroke)
  keystroke.toggle()
end, { desc = 'Switch ghost text on or off' })
command('KeystrokeStatus', function(keystroke)
  vim.notify('Keystroke: ' .. keystroke.status())
end, { desc = 'The model, its speed, and why nothing is shown' })
command('KeystrokeReconnect', function(keystroke)
  keystroke.reconnect()
end, { desc = 'Look for the gateway again' })
